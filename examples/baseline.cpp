// Where distributed training starts from: one process and plain libtorch, on random tokens. Compare with
// qwen_pretrain/train.cpp, which is this loop on any number of ranks.
//
//   ./baseline                                             all of it: 3 epochs of 2,500 steps
//   ./baseline --samples 200 --seq 64 --epochs 2           a minute or less
//
//   Epoch 0 | step 50/50 | loss 6.2519
//   Epoch 0 complete | mean loss 6.2624
//   Epoch 1 | step 50/50 | loss 6.1875
//   Epoch 1 complete | mean loss 6.1761
//
// The invariant: random tokens cannot be predicted, so the loss begins at ln(vocabulary), 6.24 for preset tiny, and
// falls below it only as far as the model learns the samples by heart.
#include <torch/torch.h>

#include <cstdio>

#include "common/command_line.h"
#include "ddp/ddp.h"
#include "qwen_pretrain/model.h"

namespace {

using example::option;

struct Options {
  std::string preset = "tiny";
  int64_t samples = 10000;
  int64_t seq = 512;
  int64_t batch = 4;
  int64_t epochs = 3;
  double lr = 1e-4;
  uint64_t seed = 42;
};

Options parse(int argc, char** argv) {
  Options options;
  boost::program_options::options_description description("baseline");
  // clang-format off
  description.add_options()
      ("preset", option(options.preset), "the model: tiny, small or qwen2.5-0.5b")
      ("samples", option(options.samples), "rows of random tokens")
      ("seq", option(options.seq), "tokens of a row")
      ("batch", option(options.batch), "rows per step")
      ("epochs", option(options.epochs), "passes over the rows")
      ("lr", option(options.lr), "learning rate of AdamW")
      ("seed", option(options.seed), "of weights, tokens and order");
  // clang-format on
  example::parse_command_line(argc, argv, description);
  return options;
}

void train(const Options& options) {
  torch::manual_seed(options.seed);
  const auto device = ddp::ProcessGroup(ddp::Env{}).device();  // the first GPU, else the CPU

  const auto config = qwen::preset(options.preset);
  const auto tokens = torch::randint(config.vocab_size, {options.samples, options.seq}, torch::kInt64);
  auto data =
      torch::data::datasets::TensorDataset(tokens).map(torch::data::transforms::Stack<torch::data::TensorExample>());
  auto loader = torch::data::make_data_loader<torch::data::samplers::RandomSampler>(std::move(data), options.batch);

  qwen::CausalLM model(config);
  model->to(device);
  torch::optim::AdamW optim(model->parameters(), torch::optim::AdamWOptions(options.lr));

  const int64_t steps = (options.samples + options.batch - 1) / options.batch;
  for (int64_t epoch = 0; epoch < options.epochs; ++epoch) {
    int64_t step = 0;
    double total_loss = 0;
    for (auto& batch : *loader) {
      const auto row = batch.data.to(device);
      const auto logits = model(row.slice(1, 0, -1));
      const auto loss = qwen::next_token_loss(logits, row.slice(1, 1));

      optim.zero_grad();
      loss.backward();
      optim.step();

      total_loss += loss.item<double>();
      if (++step % 50 == 0)
        std::printf("Epoch %ld | step %ld/%ld | loss %.4f\n", epoch, step, steps, loss.item<double>());
    }
    std::printf("Epoch %ld complete | mean loss %.4f\n", epoch, total_loss / static_cast<double>(step));
  }
}

}  // namespace

int main(int argc, char** argv) {
  ddp::use_caching_cpu_allocator();  // a step finds its memory mapped by the step before
  return ddp::run([&] { train(parse(argc, argv)); });
}
