// Files exchanged with Python in both directions. safetensors_peer.py is the other side; `safetensors_peer.py golden`
// wrote safetensors_python.safetensors with the package safetensors 0.8.0.
#include <torch/torch.h>

#include <cstring>
#include <fstream>

#include "ddp/safetensors.h"
#include "io/torch_file.h"
#include "support/catch.h"
#include "support/spawn.h"

namespace fs = std::filesystem;
using ddp::NamedTensors;
using ddp::test::operator+;

namespace {

const fs::path kGolden = fs::path(LIBDDP_TEST_DATA) / "safetensors_python.safetensors";

std::string bytes_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

bool same_bytes(const torch::Tensor& a, const torch::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         std::memcmp(a.contiguous().const_data_ptr(), b.contiguous().const_data_ptr(), a.nbytes()) == 0;
}

// What `golden` in the script saves.
NamedTensors golden_tensors() {
  NamedTensors tensors;
  const std::vector<std::pair<std::string, torch::ScalarType>> dtypes = {
      {"bool", torch::kBool},
      {"u8", torch::kByte},
      {"i8", torch::kChar},
      {"f8_e5m2", torch::kFloat8_e5m2},
      {"f8_e4m3", torch::kFloat8_e4m3fn},
      {"f8_e8m0", torch::kFloat8_e8m0fnu},
      {"f8_e4m3fnuz", torch::kFloat8_e4m3fnuz},
      {"f8_e5m2fnuz", torch::kFloat8_e5m2fnuz},
      {"i16", torch::kShort},
      {"u16", torch::kUInt16},
      {"f16", torch::kHalf},
      {"bf16", torch::kBFloat16},
      {"i32", torch::kInt},
      {"u32", torch::kUInt32},
      {"f32", torch::kFloat},
      {"c64", torch::kComplexFloat},
      {"f64", torch::kDouble},
      {"i64", torch::kLong},
      {"u64", torch::kUInt64},
  };
  for (const auto& [name, dtype] : dtypes) {
    tensors.insert(name, torch::arange(1, 7, torch::kFloat).view({2, 3}).to(dtype));
  }
  tensors.insert("scalar", torch::tensor(2.5f));
  tensors.insert("empty", torch::empty({2, 0}, torch::kLong));
  tensors.insert("special", torch::tensor({INFINITY, -0.0f, 65504.0f}).to(torch::kHalf));
  tensors.insert("é \"quoted\"\n", torch::tensor({1, 2, 3}, torch::kLong));
  return tensors;
}

ddp::test::Result peer(const std::vector<std::string>& arguments) {
  return ddp::test::run_command(
      std::vector<std::string>{*ddp::test::test_python(), std::string(LIBDDP_TEST_DATA) + "/safetensors_peer.py"} +
          arguments,
      {.deadline = std::chrono::seconds(60), .env = {{"OMP_NUM_THREADS", "1"}}});
}

}  // namespace

TEST_CASE("safetensors: the file of the Python package holds what Python put into it") {
  const auto expected = golden_tensors();
  const auto found = ddp::load_safetensors(kGolden);
  REQUIRE(found.size() == expected.size());
  for (const auto& item : expected) {
    CAPTURE(item.key());
    REQUIRE(found.contains(item.key()));
    CHECK(same_bytes(found[item.key()], item.value()));
  }
  CHECK(ddp::safetensors_metadata(kGolden) == ddp::SafetensorsMetadata{{"format", "pt"}});
}

TEST_CASE("safetensors: what is written here is the file of the Python package, byte for byte") {
  ddp::test::TempDir dir;
  ddp::save_safetensors(dir / "a.safetensors", golden_tensors());
  const std::string ours = bytes_of(dir / "a.safetensors"), theirs = bytes_of(kGolden);
  INFO(ours.substr(0, 2000) << "\n" << theirs.substr(0, 2000));
  CHECK(ours == theirs);
}

TEST_CASE("safetensors: random tensors go from Python through C++ back to Python") {
  if (!ddp::test::test_python()) DDP_SKIP("no Python with torch (LIBDDP_TEST_PYTHON)");
  ddp::test::TempDir dir;
  constexpr int kCount = 60;
  const auto written = peer({"write", std::to_string(kCount), dir.path().string()});
  INFO(written.describe());
  REQUIRE(written.ok());
  std::printf("with %s", written.output.c_str());
  for (int i = 0; i < kCount; ++i) {
    CAPTURE(i);
    const std::string stem = (dir / std::to_string(i)).string();
    NamedTensors expected;
    for (const auto& [name, value] : ddp::io::read_torch_file(stem + ".pt", false).as_dict()) {
      expected.insert(name.as_string(), value.as_tensor());
    }
    const auto found = ddp::load_safetensors(stem + ".safetensors");
    REQUIRE(found.size() == expected.size());
    for (const auto& item : expected) CHECK(same_bytes(found[item.key()], item.value()));
    ddp::save_safetensors(stem + ".cpp.safetensors", expected);
  }
  const auto compared = peer({"compare", std::to_string(kCount), dir.path().string()});
  INFO(compared.describe());
  CHECK(compared.ok());
}
