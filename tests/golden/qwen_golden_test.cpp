// The Qwen2 of the examples against transformers' (make_qwen_golden.py).
#include <torch/torch.h>

#include "../../examples/qwen_pretrain/config.h"
#include "../../examples/qwen_pretrain/fused/model.h"
#include "../../examples/qwen_pretrain/model.h"
#include "io/torch_file.h"
#include "support/catch.h"

namespace {

const std::string kFolder = LIBDDP_TEST_DATA;

void check_against_golden(const ddp::State& golden, qwen::CausalLM model) {
  const auto parameters = model->named_parameters();
  const ddp::State& weights = golden.at("parameters");
  REQUIRE(parameters.size() == weights.as_dict().size());
  torch::NoGradGuard no_grad;
  for (const auto& parameter : parameters) {
    INFO(parameter.key());
    REQUIRE(parameter.value().sizes() == weights.at(parameter.key()).as_tensor().sizes());
    parameter.value().copy_(weights.at(parameter.key()).as_tensor());
  }

  torch::AutoGradMode grad(true);
  const auto logits = model(golden.at("tokens").as_tensor());
  CHECK((logits - golden.at("logits").as_tensor()).abs().max().item<double>() < 1e-5);
  const auto loss = model(golden.at("tokens").as_tensor(), golden.at("targets").as_tensor());
  CHECK(loss.item<double>() == ddp::test::Approx(golden.at("loss").as_tensor().item<double>()).epsilon(1e-6));
  loss.backward();
  for (const auto& parameter : parameters) {
    INFO(parameter.key());
    const auto difference = parameter.value().grad() - golden.at("gradients").at(parameter.key()).as_tensor();
    CHECK(difference.abs().max().item<double>() < 1e-6);
  }
}

TEST_CASE("Qwen2 has transformers' parameter names, logits and gradients, plain and fused") {
  const ddp::State golden = ddp::io::read_torch_file(kFolder + "/qwen_golden.pt", /*follow=*/false);
  const qwen::Config config = qwen::read_config(kFolder + "/qwen_golden_config.json");
  CHECK(config.rope_theta == 1e6);
  SECTION("plain") { check_against_golden(golden, qwen::CausalLM(config)); }
  SECTION("fused") { check_against_golden(golden, qwen::fused::make_causal_lm(config)); }
}

}  // namespace
