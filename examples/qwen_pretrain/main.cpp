// Pretrains a Qwen2 model, on any number of ranks, from text or random tokens.
//
//   ./qwen_pretrain --preset tiny --data /usr/include                                    1 rank, no launcher
//   torchrun --no-python --nproc-per-node 2 ./qwen_pretrain --preset tiny --data DIR     2 ranks
//   torchrun --no-python --nproc-per-node 8 ./qwen_pretrain --random-data                Qwen2.5-0.5B in bfloat16
//
//   [ddp] model: 804992 parameters, float32
//   [ddp] data: 152998 windows of 256 tokens, 160 steps
//   [ddp] learning rate 0.003 (none scaling of 0.003 at batch 16): 8 rows x 2 accumulated x 2 ranks = 32 rows per step
//   step    1/160 | loss 6.2189 | lr 1.5e-04 | 7.9k tokens/s | 2:45 left
//   step   10/160 | loss 4.8034 | lr 1.5e-03 | 8.1k tokens/s | 2:31 left
//   ...
//   step  160/160 | loss 1.9012 | lr 3.0e-04 | 8.1k tokens/s | 0:00 left
//   [ddp] saved checkpoints/tiny/checkpoint_epoch0_step160.pt in 0.03 s
//
// then a sample of text, the path of the checkpoint and that of the loss plot. Ctrl-C (or SIGTERM, SIGUSR1) saves and
// stops; the same command goes on where it stopped. In Python:
//
//   weights = torch.load("checkpoints/tiny/checkpoint_latest.pt", weights_only=True)["model_state_dict"]
//   Qwen2ForCausalLM(config).load_state_dict(weights, strict=False)       # tied: lm_head.weight is the embedding
//
// The invariant: killed at any moment (kill -9) and started again, a run has the losses of one that was left alone, bit
// for bit, at the same number of ranks.
#include "ddp/run.h"
#include "options.h"
#include "train.h"

int main(int argc, char** argv) {
  const auto start = std::chrono::steady_clock::now();
  return ddp::run([&] { qwen::train(qwen::parse_options(argc, argv), start); });
}
