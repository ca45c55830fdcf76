// The program that ddp.h and the README show, with a small model and data set to make it whole.
//
//   ./tutorial                                              1 rank, no launcher
//   torchrun --no-python --nproc-per-node 2 ./tutorial      2 ranks
//
// Prints what the library logs, writes checkpoints to runs/a, and goes on from the newest one when it is started again.
// The invariant: kill it at any moment and start it again; it ends with the weights of a run that was left alone.
#include <torch/torch.h>

#include "ddp/ddp.h"

namespace {

// 16,384 points in 16 dimensions and, for each, the sum of its squares.
class Corpus : public torch::data::datasets::Dataset<Corpus> {
 public:
  torch::data::Example<> get(size_t row) override { return {points_[row], points_[row].square().sum(0, true)}; }
  std::optional<size_t> size() const override { return points_.size(0); }

 private:
  torch::Tensor points_ = torch::linspace(-1, 1, 16 * 16384).view({16, 16384}).t().contiguous();
};

class NetImpl : public torch::nn::Module {
 public:
  explicit NetImpl(int64_t hidden) {
    first = register_module("first", torch::nn::Linear(16, hidden));
    second = register_module("second", torch::nn::Linear(hidden, 1));
  }

  torch::Tensor forward(const torch::Tensor& x) { return second(torch::relu(first(x))); }

  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Net);

// clang-format off
// [tutorial]
void train() {
  auto group = ddp::ProcessGroup::from_env();              // torchrun, Slurm or Open MPI; alone: a world of one
  auto data = Corpus().map(torch::data::transforms::Stack<>());
  ddp::DistributedSampler sampler(*data.size(), group, {.shuffle = true, .seed = 42});
  auto loader = torch::data::make_data_loader(std::move(data), sampler, /*batch_size=*/8);

  ddp::DistributedDataParallel model(Net(1024), group);    // on group.device(), rank 0's weights everywhere
  ddp::AdamW optim(model->parameters(), {.lr = ddp::lr::linear(3e-4, group)});
  ddp::lr::Schedule schedule(optim, ddp::lr::warmup(100) * ddp::lr::cosine(10'000));

  ddp::Checkpointer checkpoints("runs/a", group, {.every = 500, .keep = 3});
  checkpoints.track("model", model).track("optimizer", optim).track("lr", schedule).track("sampler", sampler);
  checkpoints.resume();                                    // newest complete checkpoint, or a fresh start
  ddp::Preemption preemption(group);                       // SIGTERM, SIGINT, SIGUSR1, agreed over ranks

  for (auto epoch : ddp::epochs(sampler, 10)) {            // sets the epoch, begins where resume() left off
    for (auto&& [batch, micro] : epoch.accumulate(*loader, 4)) {
      auto guard = model.no_sync(!micro.last());           // average on the last of four only
      auto x = batch.data.to(group.device()), y = batch.target.to(group.device());
      auto loss = torch::mse_loss(model(x), y);
      (loss / micro.count()).backward();
      if (!micro.last()) continue;
      ddp::clip_grad_norm(model, 1.0);
      optim.step(), model.zero_grad(), schedule.step(), checkpoints.step();
      if (preemption.requested()) return checkpoints.save();
    }
  }
}
// [/tutorial]
// clang-format on

}  // namespace

int main() { return ddp::run(train); }  // an exception reaches torchrun's error report
