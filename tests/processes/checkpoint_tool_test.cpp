// ddp_checkpoint as users run it.
#include <torch/torch.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "ddp/atomic_file.h"
#include "ddp/checkpointer.h"
#include "ddp/fused_adam.h"
#include "ddp/safetensors.h"
#include "io/torch_file.h"
#include "io/zip_reader.h"
#include "support/catch.h"
#include "support/spawn.h"

namespace fs = std::filesystem;
using namespace ddp::test;
using ddp::State;
using nlohmann::json;

namespace {

std::optional<std::string> tool() {
  const std::string path = test_bin("ddp_checkpoint");
  if (!fs::exists(path)) return std::nullopt;  // LIBDDP_BUILD_TOOLS=OFF
  return path;
}

Result run(const std::vector<std::string>& arguments) {
  return run_command(std::vector<std::string>{*tool()} + arguments);
}

json run_json(const std::vector<std::string>& arguments, int code) {
  const auto result = run(arguments + std::vector<std::string>{"--json"});
  INFO(result.describe());
  REQUIRE(result.exit_code == code);
  return json::parse(result.output);
}

void save(const fs::path& path, const State& state) {
  ddp::write_file_atomically(path, [&](const ddp::Append& append) { ddp::io::write_torch_file(state, append); });
}

// Changes one byte of a record.
void damage(const fs::path& path, const std::string& record) {
  const ddp::io::ZipReader zip(ddp::io::file_system(), path.string(), false);
  const auto* found = zip.find(record);
  REQUIRE(found != nullptr);
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(found->offset));
  const char byte = static_cast<char>(file.get() ^ 0x10);
  file.seekp(static_cast<std::streamoff>(found->offset));
  file.put(byte);
}

// A run of 6 steps that keeps its checkpoints of steps 2, 4 and 6.
void train(const fs::path& directory) {
  torch::manual_seed(0);
  torch::nn::Linear model(3, 2);
  ddp::AdamW optim(model->parameters(), {.lr = 0.1});
  ddp::Checkpointer checkpoints(directory, {}, {.every = 2});
  checkpoints.track("model", model).track("optimizer", optim);
  for (int step = 0; step < 6; ++step) {
    optim.zero_grad();
    model->forward(torch::ones({4, 3})).square().sum().backward();
    optim.step();
    checkpoints.set_loss(1.5 - step);
    checkpoints.step();
  }
}

constexpr const char* kSkip = "no ddp_checkpoint (LIBDDP_BUILD_TOOLS=OFF)";

}  // namespace

TEST_CASE("ddp_checkpoint: ls, show and verify of a run, whole and damaged") {
  if (!tool()) DDP_SKIP(kSkip);
  TempDir dir;
  const fs::path directory = dir / "run";
  run_ranks(1, [&](int) { train(directory); });
  const auto file = [&](int step) {
    return (directory / (std::string("checkpoint_epoch0_step") + std::to_string(step) + ".pt")).string();
  };

  auto list = run_json({"ls", directory.string()}, 0);
  CHECK(list["latest"] == "checkpoint_epoch0_step6.pt");
  REQUIRE(list["checkpoints"].size() == 3);
  for (int i = 0; i < 3; ++i) {
    const auto& row = list["checkpoints"][static_cast<size_t>(i)];
    CHECK(row["step"] == 6 - 2 * i);
    CHECK(row["valid"] == true);
    CHECK(row["world_size"] == 1);
    CHECK(row["bytes"] == fs::file_size(file(6 - 2 * i)));
  }

  const auto shown = run_json({"show", file(4)}, 0);
  CHECK(shown["step"] == 4);
  CHECK(shown["epoch"] == 0);
  CHECK(shown["loss"] == -1.5);
  CHECK(shown["world_size"] == 1);
  bool found = false;
  for (const auto& row : shown["keys"]) {
    if (row["key"] != "model_state_dict/weight") continue;
    found = true;
    CHECK(row["type"] == "float32");
    CHECK(row["shape"] == json{2, 3});
  }
  CHECK(found);
  const auto text = run({"show", file(4)});
  CHECK_THAT(text.output, ContainsSubstring("step 4, epoch 0, loss -1.5, world size 1, by libddp"));
  CHECK_THAT(text.output, ContainsSubstring("optimizer_state_dict/state/1/exp_avg"));

  CHECK(run({"verify", file(2), file(4)}).exit_code == 0);
  damage(file(4), "data/0");
  auto verified = run({"verify", file(2), file(4)});
  CHECK(verified.exit_code == 1);
  CHECK_THAT(verified.output, ContainsSubstring("step2.pt: valid"));
  CHECK_THAT(verified.output, ContainsSubstring("step4.pt: record data/0 is damaged"));
  CHECK(run({"show", file(4)}).exit_code == 0);  // reads no tensor

  fs::resize_file(file(6), 100);
  fs::copy_file(file(2), directory / "checkpoint_epoch0_step3.pt");
  list = run_json({"ls", directory.string()}, 0);
  REQUIRE(list["checkpoints"].size() == 4);
  const std::vector<std::pair<bool, std::string>> expected = {
      {false, "no complete checkpoint"}, {false, "data/0 is damaged"}, {false, "its step is 2"}, {true, ""}};
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto& row = list["checkpoints"][i];
    CHECK(row["valid"] == expected[i].first);
    if (!expected[i].first) CHECK_THAT(row["reason"].get<std::string>(), ContainsSubstring(expected[i].second));
  }
  const auto quick = run_json({"ls", "--quick", directory.string()}, 0);
  CHECK(quick["checkpoints"][1]["valid"] == true);  // only the data is damaged
  fs::remove(file(6));
  CHECK_THAT(run({"ls", directory.string()}).output,
             ContainsSubstring("checkpoint_latest.pt -> checkpoint_epoch0_step6.pt does not exist"));
}

TEST_CASE("ddp_checkpoint: diff tells which values differ and by how much") {
  if (!tool()) DDP_SKIP(kSkip);
  TempDir dir;
  const auto base = torch::arange(6.0).view({2, 3});
  auto state = [&](const torch::Tensor& weight) {
    return State::dict({{"step", 3}, {"model_state_dict", State::dict({{"w", weight}, {"b", torch::ones(2)}})}});
  };
  const std::string a = dir / "a.pt", b = dir / "b.pt";
  save(a, state(base));
  save(b, state(base.clone()));
  CHECK(run({"diff", a, b}).exit_code == 0);
  CHECK(run_json({"diff", a, b}, 0)["equal"] == true);

  auto other = base.clone();
  other[0][1] += 0.25;
  other[1][2] -= 0.5;
  State changed = state(other);
  changed.set("step", 4);
  changed.set("more", torch::zeros(1));
  save(b, changed);
  const auto report = run_json({"diff", a, b}, 1);
  REQUIRE(report["differences"].size() == 3);
  CHECK(report["differences"][0] == json{{"key", "step"}, {"a", "3"}, {"b", "4"}});
  CHECK(report["differences"][1] == json{{"key", "model_state_dict/w"}, {"elements", 2}, {"of", 6}, {"max_abs", 0.5}});
  CHECK(report["differences"][2] == json{{"key", "more"}, {"only_in", b}});
  CHECK_THAT(run({"diff", a, b}).output, ContainsSubstring("2 of 6 elements, by 0.5 at most"));

  const auto tolerant = run_json({"diff", a, b, "--only", "model_state_dict", "--tolerance", "0.25"}, 1);
  REQUIRE(tolerant["differences"].size() == 1);
  CHECK(tolerant["differences"][0]["elements"] == 1);
  CHECK(run({"diff", a, b, "--only", "model_state_dict", "--tolerance", "0.5"}).exit_code == 0);

  // Bits, not values: -0 is not 0, and the same NaN is equal. Shapes and dtypes are named.
  save(a, State::dict({{"x", torch::tensor({0.0f, NAN})}, {"y", torch::zeros(2)}, {"z", torch::zeros(2)}}));
  save(b,
       State::dict({{"x", torch::tensor({-0.0f, NAN})}, {"y", torch::zeros(3)}, {"z", torch::zeros(2, torch::kHalf)}}));
  const auto bits = run_json({"diff", a, b}, 1)["differences"];
  REQUIRE(bits.size() == 3);
  CHECK(bits[0] == json{{"key", "x"}, {"elements", 1}, {"of", 2}, {"max_abs", 0.0}});
  CHECK(bits[1] == json{{"key", "y"}, {"a", "float32 [2]"}, {"b", "float32 [3]"}});
  CHECK(bits[2] == json{{"key", "z"}, {"a", "float32 [2]"}, {"b", "float16 [2]"}});

  // Large tensors are compared in pieces.
  const auto large = torch::zeros({3, 700'000});
  auto one = large.clone();
  one[2][699'999] = 1;
  save(a, State::dict({{"x", large}}));
  save(b, State::dict({{"x", one}}));
  CHECK(run_json({"diff", a, b}, 1)["differences"][0]["elements"] == 1);
}

TEST_CASE("ddp_checkpoint: export writes the weights, tied ones once") {
  if (!tool()) DDP_SKIP(kSkip);
  TempDir dir;
  const auto weight = torch::randn({4, 3}).to(torch::kBFloat16);
  const std::string from = dir / "a.pt", to = dir / "out.safetensors";
  save(from,
       State::dict({{"model_state_dict",
                     State::dict({{"module.embed", weight}, {"module.bias", torch::ones(2)}, {"module.head", weight}})},
                    {"step", 1}}));
  const auto result = run({"export", from, to});
  INFO(result.describe());
  REQUIRE(result.exit_code == 0);
  CHECK_THAT(result.output, ContainsSubstring("head is tied to embed and not written"));
  const auto tensors = ddp::load_safetensors(fs::path(to));
  CHECK(tensors.size() == 2);
  CHECK(tensors["embed"].equal(weight));
  CHECK(tensors["bias"].equal(torch::ones(2)));
  CHECK(run_json({"show", to}, 0)["tensors"] == 2);
  CHECK(run({"verify", to}).exit_code == 0);

  CHECK_THAT(run({"export", from, to, "--refuse-tied"}).output, ContainsSubstring("share memory"));
  CHECK(run({"export", from, to, "--refuse-tied"}).exit_code == 2);
  const auto wrong = run({"export", from, to, "--key", "ema"});
  CHECK(wrong.exit_code == 2);
  CHECK_THAT(wrong.output, ContainsSubstring("has no key ema; --key can be model_state_dict"));

  save(from, State::dict({{"w", torch::ones(3)}}));  // a bare state_dict
  CHECK(run({"export", from, to}).exit_code == 0);
  CHECK(run({"diff", from, to}).exit_code == 0);
}

TEST_CASE("ddp_checkpoint: faults are one line and an exit code") {
  if (!tool()) DDP_SKIP(kSkip);
  TempDir dir;
  std::ofstream(dir / "text.pt") << "not a checkpoint";
  const std::string absent = dir / "absent.pt", text = dir / "text.pt";
  struct Row {
    std::vector<std::string> arguments;
    int code;
    std::string message;
  };
  for (const Row& row :
       {Row{{"show", absent}, 2, absent + ": cannot be opened: No such file"}, Row{{"show", text}, 2, text + ": is no"},
        Row{{"verify", absent}, 1, absent + ": cannot be opened: No such file"},
        Row{{"diff", absent, absent}, 2, absent + ": cannot be opened"},
        Row{{"ls", absent}, 2, absent + ": is no directory"},
        Row{{"export", absent, text}, 2, absent + ": cannot be opened"}, Row{{}, 2, "expected a command"},
        Row{{"list"}, 2, "no command list"}, Row{{"show"}, 2, "expected 1 of paths, found 0"},
        Row{{"diff", absent}, 2, "expected 2"}, Row{{"show", "--wat", text}, 2, "--wat"},
        Row{{"diff", absent, absent, "--tolerance", "x"}, 2, "tolerance"}}) {
    const auto result = run(row.arguments);
    INFO(result.describe());
    CHECK(result.exit_code == row.code);
    CHECK_THAT(result.output, ContainsSubstring(row.message));
    CHECK(std::count(result.output.begin(), result.output.end(), '\n') == 1);
  }
  const auto help = run({"--help"});
  CHECK(help.exit_code == 0);
  CHECK_THAT(help.output, ContainsSubstring("usage: ddp_checkpoint COMMAND"));
  CHECK(run({"ls", dir.path().string()}).exit_code == 0);
  CHECK_THAT(run({"ls", dir.path().string()}).output, ContainsSubstring("no checkpoint in"));
}
