// Open this first. It includes the rest in reading order; the program it makes possible:
//
//   void train() {
//     auto group = ddp::ProcessGroup::from_env();              // torchrun, Slurm or Open MPI; alone: a world of one
//     auto data = Corpus().map(torch::data::transforms::Stack<>());
//     ddp::DistributedSampler sampler(*data.size(), group, {.shuffle = true, .seed = 42});
//     auto loader = torch::data::make_data_loader(std::move(data), sampler, /*batch_size=*/8);
//
//     ddp::DistributedDataParallel model(Net(1024), group);    // on group.device(), rank 0's weights everywhere
//     ddp::AdamW optim(model->parameters(), {.lr = ddp::lr::linear(3e-4, group)});
//     ddp::lr::Schedule schedule(optim, ddp::lr::warmup(100) * ddp::lr::cosine(10'000));
//
//     ddp::Checkpointer checkpoints("runs/a", group, {.every = 500, .keep = 3});
//     checkpoints.track("model", model).track("optimizer", optim).track("lr", schedule).track("sampler", sampler);
//     checkpoints.resume();                                    // newest complete checkpoint, or a fresh start
//     ddp::Preemption preemption(group);                       // SIGTERM, SIGINT, SIGUSR1, agreed over ranks
//
//     for (auto epoch : ddp::epochs(sampler, 10)) {            // sets the epoch, begins where resume() left off
//       for (auto&& [batch, micro] : epoch.accumulate(*loader, 4)) {
//         auto guard = model.no_sync(!micro.last());           // average on the last of four only
//         auto x = batch.data.to(group.device()), y = batch.target.to(group.device());
//         auto loss = torch::mse_loss(model(x), y);
//         (loss / micro.count()).backward();
//         if (!micro.last()) continue;
//         ddp::clip_grad_norm(model, 1.0);
//         optim.step(), model.zero_grad(), schedule.step(), checkpoints.step();
//         if (preemption.requested()) return checkpoints.save();
//       }
//     }
//   }
//   int main() { return ddp::run(train); }                     // an exception reaches torchrun's error report
#pragma once

// In the order in which they are read, not of the alphabet.
// clang-format off

// base and place
#include "ddp/version.h"
#include "ddp/error.h"
#include "ddp/place.h"
#include "ddp/env.h"
#include "ddp/log.h"
#include "ddp/run.h"
#include "ddp/random.h"
#include "ddp/cpu_allocator.h"

// group
#include "ddp/process_group.h"
#include "ddp/collectives.h"
#include "ddp/autograd.h"

// data
#include "ddp/distributed_sampler.h"
#include "ddp/for_each_tensor.h"
#include "ddp/prefetch.h"

// model
#include "ddp/distributed_data_parallel.h"
#include "ddp/sync_batch_norm.h"
#include "ddp/grad.h"

// optimizer
#include "ddp/fused_optimizer.h"
#include "ddp/fused_adam.h"
#include "ddp/fused_sgd.h"
#include "ddp/lr_scaling.h"
#include "ddp/lr_schedule.h"

// checkpoint
#include "ddp/state.h"
#include "ddp/atomic_file.h"
#include "ddp/stateful.h"
#include "ddp/checkpointer.h"
#include "ddp/safetensors.h"

// loop
#include "ddp/preemption.h"
#include "ddp/loop.h"
#include "ddp/join.h"
#include "ddp/meter.h"
#include "ddp/profile.h"
// clang-format on
