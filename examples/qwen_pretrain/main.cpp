// Pretrains a Qwen2 model, on any number of ranks, from text or random tokens.
//
//   ./qwen_pretrain --preset tiny --data /usr/include                                    1 rank, no launcher
//   torchrun --no-python --nproc-per-node 2 ./qwen_pretrain --preset tiny --data DIR     2 ranks
//   torchrun --no-python --nproc-per-node 8 ./qwen_pretrain --random-data                Qwen2.5-0.5B in bfloat16
//
//   [ddp] model: 804992 parameters, float32, fused kernels
//   [ddp] data: 152998 windows of 256 tokens, 150 steps
//   [ddp] learning rate 0.003 (none scaling of 0.003 at batch 16): 8 rows x 2 accumulated x 2 ranks = 32 rows per step
//   step    1/150 | loss 6.2230 | lr 7.5e-05 | 23.2k tokens/s | 0:53 left
//   step   10/150 | loss 5.3324 | lr 7.4e-04 | 28.4k tokens/s | 0:40 left
//   ...
//   step  150/150 | loss 1.6013 | lr 3.0e-04 | 32.1k tokens/s | 0:00 left
//   [ddp] saved runs/tiny/checkpoint_epoch0_step150.pt in 0.01 s (9.8 MB)
//
// then a sample of text, the path of the checkpoint and that of the loss plot. Ctrl-C (or SIGTERM, SIGUSR1) saves and
// stops; the same command goes on where it stopped. In Python:
//
//   weights = torch.load("checkpoints/tiny/checkpoint_latest.pt", weights_only=True)["model_state_dict"]
//   Qwen2ForCausalLM(config).load_state_dict(weights, strict=False)       # tied: lm_head.weight is the embedding
//
// The invariant: killed at any moment (kill -9) and started again, a run has the losses of one that was left alone, bit
// for bit, at the same number of ranks.
#include "ddp/cpu_allocator.h"
#include "ddp/run.h"
#include "options.h"
#include "train.h"

int main(int argc, char** argv) {
  const auto start = std::chrono::steady_clock::now();
  ddp::use_caching_cpu_allocator();  // a step finds its memory mapped by the step before
  return ddp::run([&] { qwen::train(qwen::parse_options(argc, argv), start); });
}
