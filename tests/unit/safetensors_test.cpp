#include "ddp/safetensors.h"

#include <torch/torch.h>

#include <cstring>
#include <fstream>

#include "ddp/error.h"
#include "ddp/stateful.h"
#include "io/file_system.h"
#include "io/safetensors_file.h"
#include "support/catch.h"
#include "support/spawn.h"
#include "unit/faulty_file_system.h"

namespace fs = std::filesystem;
using ddp::CheckpointError;
using ddp::NamedTensors;
using ddp::test::ContainsSubstring;
using ddp::test::message_of;
using ddp::test::TempDir;
using namespace std::string_literals;

namespace {

std::string bytes_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
void write(const fs::path& path, const std::string& bytes) {
  fs::remove(path);
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string length(uint64_t size) { return std::string(reinterpret_cast<const char*>(&size), sizeof size); }
// A file as the format describes it, with whatever header.
std::string file(const std::string& header, const std::string& data = "") {
  return length(header.size()) + header + data;
}

// The message for a file that must be refused.
std::string refusal(const std::string& bytes) {
  TempDir dir;
  write(dir / "a.safetensors", bytes);
  const auto message = message_of<CheckpointError>([&] { ddp::load_safetensors(dir / "a.safetensors"); });
  CHECK_THAT(message, ContainsSubstring("a.safetensors"));
  return message;
}

bool same_bytes(const torch::Tensor& a, const torch::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         std::memcmp(a.contiguous().const_data_ptr(), b.contiguous().const_data_ptr(), a.nbytes()) == 0;
}

NamedTensors round_trip(const NamedTensors& tensors) {
  TempDir dir;
  ddp::save_safetensors(dir / "a.safetensors", tensors);
  return ddp::load_safetensors(dir / "a.safetensors");
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(3, 4));
    calls = register_buffer("calls", torch::arange(2));
  }
  torch::nn::Linear first{nullptr};
  torch::Tensor calls;
};
TORCH_MODULE(Net);

// An embedding and a head with one weight, under two names.
struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    auto weight = torch::randn({5, 2});
    embed = register_parameter("embed", weight);
    head = register_parameter("head", embed);
  }
  torch::Tensor embed, head;
};
TORCH_MODULE(Tied);

}  // namespace

TEST_CASE("safetensors: the example of the format's own documentation") {
  // safetensors/src/tensor.rs, SafeTensors::deserialize
  TempDir dir;
  write(dir / "a.safetensors",
        "<\0\0\0\0\0\0\0"s + R"({"test":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}})" + std::string(16, '\0'));
  const auto tensors = ddp::load_safetensors(dir / "a.safetensors");
  REQUIRE(tensors.size() == 1);
  CHECK(tensors["test"].equal(torch::zeros({2, 2}, torch::kInt)));
}

TEST_CASE("safetensors: every dtype and shape comes back, bit for bit") {
  NamedTensors tensors;
  for (auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16, torch::kLong, torch::kInt,
                     torch::kShort, torch::kChar, torch::kByte, torch::kBool, torch::kComplexFloat, torch::kUInt16,
                     torch::kUInt32, torch::kUInt64, torch::kFloat8_e4m3fn, torch::kFloat8_e5m2,
                     torch::kFloat8_e4m3fnuz, torch::kFloat8_e5m2fnuz, torch::kFloat8_e8m0fnu}) {
    const auto name = std::string(c10::toString(dtype));
    tensors.insert(name, torch::arange(1, 13, torch::kFloat).view({3, 4}).to(dtype));
    tensors.insert(name + ".scalar", torch::ones({}, torch::kFloat).to(dtype));
  }
  const auto base = torch::arange(24.0).view({4, 6});
  tensors.insert("é \"quoted\"\n", torch::tensor({std::nanf(""), -0.0f, INFINITY}));
  tensors.insert("empty", torch::empty({0}));
  tensors.insert("empty.2", torch::empty({2, 0, 3}, torch::kLong));
  tensors.insert("transposed", base.t());
  tensors.insert("strided", torch::arange(20).slice(0, 1, 20, 3));
  tensors.insert("conj", torch::complex(base.clone(), base.clone()).conj());
  tensors.insert("neg", torch::imag(torch::complex(base.clone(), base.clone()).conj()));
  tensors.insert("grad", torch::ones({2}, torch::requires_grad()));
  const auto back = round_trip(tensors);
  REQUIRE(back.size() == tensors.size());
  for (const auto& item : tensors) {
    CAPTURE(item.key());
    const auto& loaded = back[item.key()];
    CHECK(same_bytes(loaded, item.value().detach().resolve_conj().resolve_neg()));
    CHECK(loaded.is_contiguous());
    CHECK_FALSE(loaded.requires_grad());
  }
}

TEST_CASE("safetensors: layout as the format asks: wide dtypes first, then names, padded header, no hole") {
  TempDir dir;
  ddp::save_safetensors(dir / "a.safetensors",
                        {{"b", torch::tensor({int8_t{1}, int8_t{2}, int8_t{3}}, torch::kChar)},
                         {"c", torch::tensor({1.0f})},
                         {"a", torch::tensor({2.0f})},
                         {"d", torch::tensor(int64_t{7})}},
                        {{"note", "x"}});
  const std::string header =
      R"({"__metadata__":{"format":"pt","note":"x"},"d":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
      R"("a":{"dtype":"F32","shape":[1],"data_offsets":[8,12]},"c":{"dtype":"F32","shape":[1],"data_offsets":[12,16]},)"
      R"("b":{"dtype":"I8","shape":[3],"data_offsets":[16,19]}})";
  const std::string padded = header + std::string((8 - header.size() % 8) % 8, ' ');
  CHECK(bytes_of(dir / "a.safetensors") == file(padded, "\7\0\0\0\0\0\0\0\0\0\0\x40\0\0\x80\x3f\1\2\3"s));
  CHECK(ddp::safetensors_metadata(dir / "a.safetensors") == ddp::SafetensorsMetadata{{"format", "pt"}, {"note", "x"}});
  std::vector<std::string> order;
  for (const auto& item : ddp::load_safetensors(dir / "a.safetensors")) order.push_back(item.key());
  CHECK(order == std::vector<std::string>{"d", "a", "c", "b"});

  ddp::save_safetensors(dir / "none.safetensors", NamedTensors{}, {{"format", "np"}});
  CHECK(ddp::load_safetensors(dir / "none.safetensors").is_empty());
  CHECK(ddp::safetensors_metadata(dir / "none.safetensors") == ddp::SafetensorsMetadata{{"format", "np"}});
}

TEST_CASE("safetensors: mapped tensors outlive the file, and writing to one changes nothing else") {
  TempDir dir;
  const auto path = dir / "a.safetensors";
  ddp::save_safetensors(path, {{"a", torch::arange(1000.0)}});
  auto first = ddp::load_safetensors(path), second = ddp::load_safetensors(path);
  first["a"].fill_(7);
  CHECK(second["a"].equal(torch::arange(1000.0)));
  CHECK(ddp::load_safetensors(path)["a"].equal(torch::arange(1000.0)));
  ddp::save_safetensors(path, {{"a", torch::zeros(3)}});
  fs::remove(path);
  CHECK(second["a"].equal(torch::arange(1000.0)));
  CHECK(second["a"].storage().nbytes() == 4000);  // saved elsewhere, it is no more than itself
}

TEST_CASE("safetensors: tensors at odd places are copied") {
  TempDir dir;
  const std::string data = std::string("\1") + std::string("\0\0\x80\x3f\0\0\0\x40", 8);
  for (const std::string padding : {"", " ", "  ", "   ", "       "}) {
    write(
        dir / "a.safetensors",
        file(
            R"({"f":{"dtype":"F32","shape":[2],"data_offsets":[1,9]},"b":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]}})" +
                padding,
            data));
    const auto tensors = ddp::load_safetensors(dir / "a.safetensors");
    CHECK(tensors["f"].equal(torch::tensor({1.0f, 2.0f})));
    CHECK(reinterpret_cast<uintptr_t>(tensors["f"].const_data_ptr()) % 4 == 0);
    CHECK(tensors["b"].equal(torch::tensor({true})));
  }
}

TEST_CASE("safetensors: names that share memory are refused, or the first is written") {
  TempDir dir;
  const auto path = dir / "a.safetensors";
  const auto weight = torch::randn({4, 3});
  const NamedTensors tensors{{"embed", weight}, {"other", torch::ones(2)}, {"head", weight}};
  const auto message = message_of<CheckpointError>([&] { ddp::save_safetensors(path, tensors); });
  CHECK_THAT(message, ContainsSubstring("embed, head"));
  CHECK_THAT(message, ContainsSubstring("kDrop"));
  CHECK_FALSE(fs::exists(path));

  ddp::save_safetensors(path, tensors, {}, {.tied = ddp::Tied::kDrop});
  const auto back = ddp::load_safetensors(path);
  CHECK(back.size() == 2);
  CHECK(back["embed"].equal(weight));
  CHECK(ddp::safetensors_metadata(path) == ddp::SafetensorsMetadata{{"format", "pt"}, {"head", "embed"}});

  // Parts of one storage that do not overlap are no ties; those that do cannot be written in either way.
  const auto flat = torch::arange(12.0);
  CHECK(round_trip(
            {{"a", flat.slice(0, 0, 6)}, {"b", flat.slice(0, 6, 12).view({2, 3})}, {"e", flat.slice(0, 0, 0)}})["b"]
            .equal(torch::arange(6.0, 12.0).view({2, 3})));
  for (auto tied : {ddp::Tied::kRefuse, ddp::Tied::kDrop}) {
    CHECK_THAT(message_of<CheckpointError>([&] {
                 ddp::save_safetensors(path, {{"a", flat}, {"b", flat.slice(0, 6, 12)}}, {}, {.tied = tied});
               }),
               ContainsSubstring("in part"));
  }
}

TEST_CASE("safetensors: what cannot be written is named") {
  TempDir dir;
  const auto path = dir / "a.safetensors";
  auto message = [&](const NamedTensors& tensors, const ddp::SafetensorsMetadata& metadata = {}) {
    return message_of<CheckpointError>([&] { ddp::save_safetensors(path, tensors, metadata); });
  };
  CHECK_THAT(message({{"w", torch::eye(2).to_sparse()}}), ContainsSubstring("tensor w"));
  CHECK_THAT(message({{"w", torch::zeros(2, torch::kComplexDouble)}}), ContainsSubstring("ComplexDouble"));
  CHECK_THAT(message({{"w", torch::zeros(2, torch::kMeta)}}), ContainsSubstring("meta"));
  CHECK_THAT(message({{"w", torch::Tensor()}}), ContainsSubstring("undefined"));
  CHECK_THAT(message({{"\xff", torch::zeros(2)}}), ContainsSubstring("UTF-8"));
  CHECK_THAT(message({{"__metadata__", torch::zeros(2)}}), ContainsSubstring("__metadata__"));
  CHECK_THAT(message({{"w", torch::zeros(2)}}, {{"note", "\xc0"}}), ContainsSubstring("UTF-8"));
  CHECK(fs::is_empty(dir.path()));
  CHECK_THAT(message_of<CheckpointError>([&] { ddp::save_safetensors(dir / "no/a.safetensors", NamedTensors{}); }),
             ContainsSubstring("no/a.safetensors"));
}

TEST_CASE("safetensors: a save that fails leaves the old file and nothing else, whichever call fails") {
  const NamedTensors tensors{{"a", torch::arange(50.0)}};
  for (int k = 1; k < 50; ++k) {
    TempDir dir;
    write(dir / "a.safetensors", "old");
    ddp::test::FaultyFileSystem faulty;
    faulty.fail_at = k;
    faulty.error = ENOSPC;
    bool failed = false;
    {
      ddp::io::ScopedFileSystem scope(faulty);
      try {
        ddp::save_safetensors(dir / "a.safetensors", tensors);
      } catch (const CheckpointError&) {
        failed = true;
      }
    }
    if (!failed) {
      CHECK(k > 5);
      return;
    }
    CHECK(std::distance(fs::directory_iterator(dir.path()), {}) == 1);
    if (faulty.calls.back() != "fsync directory") CHECK(bytes_of(dir / "a.safetensors") == "old");
  }
  FAIL("the save never worked");
}

TEST_CASE("safetensors: into a module, strictly or not, with and without module.") {
  TempDir dir;
  const auto path = dir / "a.safetensors";
  Net from, into;
  into->calls.zero_();
  ddp::save_safetensors(path, *from);
  const auto loaded = ddp::load_safetensors(path, *into);
  CHECK(loaded.missing.empty());
  CHECK(loaded.converted.empty());
  CHECK(ddp::state_dict(*into) == ddp::state_dict(*from));

  NamedTensors prefixed;
  for (auto& [name, value] : ddp::state_dict(*from).as_dict())
    prefixed.insert("module." + name.as_string(), value.as_tensor());
  ddp::save_safetensors(path, prefixed);
  Net again;
  ddp::load_safetensors(path, *again);
  CHECK(ddp::state_dict(*again) == ddp::state_dict(*from));
  for (auto& item : prefixed) item.value() = torch::zeros_like(item.value());
  ddp::save_safetensors(path, *from);
  ddp::load_safetensors(path, prefixed);  // the other way round
  CHECK(prefixed["module.first.bias"].equal(from->first->bias));

  // All that does not fit is in one message, and nothing was changed.
  ddp::save_safetensors(
      path, {{"first.weight", torch::zeros({3, 4})}, {"first.bias", torch::zeros(4)}, {"more", torch::zeros(1)}});
  const auto message = message_of<CheckpointError>([&] { ddp::load_safetensors(path, *again); });
  CHECK_THAT(message, ContainsSubstring(
                          "missing: calls; unexpected: more; other shapes: first.weight [3, 4] instead of [4, 3]"));
  CHECK_THAT(message_of<CheckpointError>([&] { ddp::load_safetensors(path, *again, {.strict = false}); }),
             ContainsSubstring("does not fit: other shapes: first.weight"));
  CHECK(again->first->bias.equal(from->first->bias));

  ddp::save_safetensors(path,
                        {{"first.bias", torch::tensor({1, 2, 3, 4}).to(torch::kBFloat16)}, {"more", torch::zeros(1)}});
  const auto partly = ddp::load_safetensors(path, *again, {.strict = false});
  CHECK(partly.missing == std::vector<std::string>{"calls", "first.weight"});
  CHECK(partly.unexpected == std::vector<std::string>{"more"});
  CHECK(partly.converted == std::vector<std::string>{"first.bias"});
  CHECK(again->first->bias.equal(torch::tensor({1.0f, 2.0f, 3.0f, 4.0f})));
  CHECK(again->first->weight.equal(from->first->weight));
}

TEST_CASE("safetensors: tied weights of a module load from either name") {
  TempDir dir;
  const auto path = dir / "a.safetensors";
  const auto weight = torch::arange(10.0).view({5, 2});
  for (const std::string name : {"embed", "head"}) {
    Tied model;
    REQUIRE(model->embed.is_same(model->head));
    ddp::save_safetensors(path, {{name, weight}});
    ddp::load_safetensors(path, *model);
    CHECK(model->embed.equal(weight));
    CHECK(model->embed.is_same(model->head));
  }
  Tied model;
  ddp::save_safetensors(path, {{"embed", weight}, {"head", weight.clone()}});
  ddp::load_safetensors(path, *model);
  CHECK(model->head.equal(weight));
  ddp::save_safetensors(path, {{"embed", weight + 1}, {"head", weight}});
  CHECK_THAT(message_of<CheckpointError>([&] { ddp::load_safetensors(path, *model); }),
             ContainsSubstring("two that differ: embed and head"));
  CHECK(model->head.equal(weight));
  CHECK_THROWS_AS(ddp::save_safetensors(path, *model), CheckpointError);
  ddp::save_safetensors(path, *model, {}, {.tied = ddp::Tied::kDrop});
  CHECK(ddp::load_safetensors(path).size() == 1);
}

TEST_CASE("safetensors: shards by their index, or by their folder") {
  TempDir dir;
  const std::string index_name = "model.safetensors.index.json";
  CHECK_THAT(message_of<CheckpointError>([&] { ddp::load_safetensors(dir.path()); }), ContainsSubstring("has neither"));
  ddp::save_safetensors(dir / "model-00001-of-00002.safetensors", {{"b", torch::ones(2)}, {"a", torch::ones(3)}});
  ddp::save_safetensors(dir / "model-00002-of-00002.safetensors", {{"c", torch::ones(4)}});
  auto index = [&](const std::string& text) { write(dir / index_name, text); };
  const std::string good =
      R"({"metadata":{"total_size":36,"more":[1,{"x":null}]},"weight_map":{"c":"model-00002-of-00002.safetensors",)"
      R"("a":"model-00001-of-00002.safetensors","b":"model-00001-of-00002.safetensors"}})";
  index(good);
  for (const fs::path& path : {dir.path(), dir / index_name}) {
    std::vector<std::string> names;
    for (const auto& item : ddp::load_safetensors(path)) names.push_back(item.key());
    CHECK(names == std::vector<std::string>{"c", "a", "b"});  // shards as the index names them, each by its data
  }

  auto refused = [&](const std::string& text) {
    index(text);
    const auto message = message_of<CheckpointError>([&] { ddp::load_safetensors(dir.path()); });
    CHECK_THAT(message, ContainsSubstring(index_name));
    return message;
  };
  auto map = [](const std::string& entries) { return R"({"weight_map":{)" + entries + "}}"; };
  const std::string one = R"("a":"model-00001-of-00002.safetensors")",
                    two = R"("b":"model-00001-of-00002.safetensors")";
  CHECK_THAT(refused(map(one)), ContainsSubstring("b of model-00001-of-00002.safetensors is not in weight_map"));
  CHECK_THAT(refused(map(one + "," + two + R"(,"x":"model-00002-of-00002.safetensors")")),
             ContainsSubstring("tensor c"));
  CHECK_THAT(refused(map(one + "," + two + R"(,"x":"model-00001-of-00002.safetensors")")),
             ContainsSubstring("x (model-00001"));
  CHECK_THAT(refused(map(one + R"(,"b":"model-00002-of-00002.safetensors")")),
             ContainsSubstring("is to be in another file"));
  CHECK_THAT(refused(map(one + "," + one)), ContainsSubstring("names a twice"));
  for (const std::string name : {"../a.safetensors", "/etc/passwd", "..", "", "sub/a.safetensors", "a\\u0000b"}) {
    CHECK_THAT(refused(map("\"a\":\"" + name + "\"")), ContainsSubstring("a name in the same folder was expected"));
  }
  CHECK_THAT(refused("{}"), ContainsSubstring("no weight_map"));
  CHECK_THAT(refused(map("")), ContainsSubstring("no weight_map"));
  CHECK_THAT(refused(R"({"weight_map":["a"]})"), ContainsSubstring("weight_map is to hold"));
  CHECK_THAT(refused(R"({"weight_map":{"a":1}})"), ContainsSubstring("weight_map is to hold"));
  CHECK_THAT(refused(R"({"weight_map":{"a":{}}})"), ContainsSubstring("weight_map is to hold"));
  CHECK_THAT(refused(R"({"weight_map":{},"weight_map":{}})"), ContainsSubstring("twice"));
  CHECK_THAT(refused(R"({"x":)" + std::string(100, '[')), ContainsSubstring("nested deeper"));
  CHECK_THAT(refused("[]"), ContainsSubstring("begin"));
  CHECK_THAT(refused(R"({"weight_map":{"a")"), ContainsSubstring("no JSON"));
  index(map(R"("a":"absent.safetensors")"));
  CHECK_THAT(message_of<CheckpointError>([&] { ddp::load_safetensors(dir.path()); }),
             ContainsSubstring("No such file"));

  ddp::save_safetensors(dir / "model.safetensors", {{"whole", torch::ones(1)}});  // comes before an index
  CHECK(ddp::load_safetensors(dir.path())["whole"].numel() == 1);
}

TEST_CASE("safetensors: hostile files are refused, each by its fault") {
  auto entry = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
  };
  auto one = [&](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return file(R"({"x":)" + entry(dtype, shape, offsets) + "}", "12345678");
  };
  CHECK_THAT(refusal(""), ContainsSubstring("too few"));
  CHECK_THAT(refusal("1234567"), ContainsSubstring("too few"));
  CHECK_THAT(refusal(length(0)), ContainsSubstring("begin with {"));
  for (uint64_t size : {uint64_t{1}, uint64_t{1} << 32, uint64_t{1} << 63, UINT64_MAX, UINT64_MAX - 7}) {
    CHECK_THAT(refusal(length(size)), ContainsSubstring("the header is to have " + std::to_string(size) + " bytes"));
  }
  CHECK_THAT(refusal(length(3) + "{}"), ContainsSubstring("truncated"));
  CHECK_THAT(refusal(file("[]")), ContainsSubstring("begin with {"));
  CHECK_THAT(refusal(file(" {}")), ContainsSubstring("begin with {"));
  CHECK_THAT(refusal(file("{\"\xff\":1}")), ContainsSubstring("UTF-8"));
  CHECK_THAT(refusal(file("{\"\xed\xa0\x80\":1}")), ContainsSubstring("no JSON"));  // a surrogate
  CHECK_THAT(refusal(file(R"({"x")")), ContainsSubstring("byte 4 of the header: no JSON"));
  CHECK_THAT(refusal(file("{} x")), ContainsSubstring("no JSON"));
  CHECK_THAT(refusal(file("{}\0"s)), ContainsSubstring("byte 2: a zero byte"));
  CHECK_THAT(refusal(file(std::string(100'000, '{'))), ContainsSubstring("byte 3: nested deeper than 3"));
  CHECK_THAT(refusal(file(R"({"x":)" + std::string(100'000, '['))), ContainsSubstring("nested deeper"));
  CHECK_THAT(refusal(file("{\"" + std::string(2 << 20, 'a') + "\":1}")), ContainsSubstring("a text of more than"));
  CHECK_THAT(refusal(file("{\"a\":" + std::string(1000, '1') + "}")), ContainsSubstring("without an end"));
  CHECK_THAT(refusal(file("{}", "x")), ContainsSubstring("1 bytes after the last tensor"));

  // What stands in the header
  CHECK_THAT(refusal(file(R"({"x":1})")), ContainsSubstring("key \"x\" of the header has 1"));
  CHECK_THAT(refusal(file(R"({"x":null})")), ContainsSubstring("has null"));
  CHECK_THAT(refusal(file(R"({"x":[]})")), ContainsSubstring("has an array"));
  CHECK_THAT(refusal(file(R"({"x":"y"})")), ContainsSubstring("has \"y\""));
  CHECK_THAT(refusal(file(R"({"x":{}})")), ContainsSubstring("\"x\" lacks one of"));
  CHECK_THAT(refusal(file(R"({"x":{"dtype":"F32","shape":[]}})")), ContainsSubstring("lacks one of"));
  CHECK_THAT(refusal(file(R"({"x":{"dtype":"F32","dtype":"F32"}})")), ContainsSubstring("dtype twice"));
  CHECK_THAT(refusal(file(R"({"x":{"strides":[1]}})")), ContainsSubstring("has the field \"strides\""));
  CHECK_THAT(refusal(file(R"({"__metadata__":{"a":1}})")), ContainsSubstring("__metadata__ has 1 under the key \"a\""));
  CHECK_THAT(refusal(file(R"({"__metadata__":{"a":{}}})")), ContainsSubstring("texts only"));
  CHECK_THAT(refusal(file(R"({"__metadata__":{"a":"b","a":"c"}})")), ContainsSubstring("\"a\" twice"));
  CHECK_THAT(refusal(file(R"({"__metadata__":{},"__metadata__":{}})")), ContainsSubstring("__metadata__ twice"));
  const auto empty = entry("F32", "[0]", "[0,0]");
  CHECK_THAT(refusal(file(R"({"x":)" + empty + R"(,"x":)" + empty + "}")), ContainsSubstring("\"x\" is there twice"));
  CHECK_THAT(refusal(one("F33", "[2]", "[0,8]")), ContainsSubstring("\"x\" has the dtype \"F33\"; known are BOOL"));
  CHECK_THAT(refusal(one("F4", "[16]", "[0,8]")), ContainsSubstring("F4"));
  CHECK_THAT(refusal(file(R"({"x":{"dtype":5}})")), ContainsSubstring("has 5 in its dtype"));
  CHECK_THAT(refusal(file(R"({"x":{"shape":"y"}})")), ContainsSubstring("in its shape"));

  // Numbers
  for (const std::string bad : {"-1", "1.0", "1e3", "null", "\"1\"", "18446744073709551616"}) {
    CHECK_THAT(refusal(one("F32", "[" + bad + "]", "[0,8]")), ContainsSubstring("tensor \"x\""));
    CHECK_THAT(refusal(one("F32", "[2]", "[" + bad + ",8]")), ContainsSubstring("tensor \"x\""));
  }
  CHECK_THAT(refusal(one("F32", "[9223372036854775808]", "[0,8]")), ContainsSubstring("has the size"));
  CHECK_THAT(refusal(one("F32", "[4294967296,4294967296]", "[0,8]")), ContainsSubstring("more than 2^63"));
  CHECK_THAT(refusal(one("F32", "[0,4294967296,4294967296]", "[0,8]")), ContainsSubstring("more than 2^63"));
  CHECK_THAT(refusal(one("F32", "[4611686018427387904]", "[0,8]")), ContainsSubstring("more than 2^63"));
  std::string ones = "1";
  for (int i = 0; i < 64; ++i) ones += ",1";
  CHECK_THAT(refusal(one("F64", "[" + ones + "]", "[0,8]")), ContainsSubstring("64 dimensions"));

  // Places
  CHECK_THAT(refusal(one("F32", "[3]", "[0,8]")), ContainsSubstring("takes 12 bytes"));
  CHECK_THAT(refusal(one("F32", "[]", "[0,8]")), ContainsSubstring("takes 4 bytes"));
  CHECK_THAT(refusal(one("F32", "[2]", "[8,0]")), ContainsSubstring("[8, 0)"));
  CHECK_THAT(refusal(one("F32", "[2]", "[0,18446744073709551615]")), ContainsSubstring("of the data, which has 8"));
  CHECK_THAT(refusal(one("F32", "[2]", "[8,16]")), ContainsSubstring("[8, 16) of the data, which has 8"));
  CHECK_THAT(refusal(one("F32", "[2]", "[0,8,8]")), ContainsSubstring("has 8 in its data_offsets"));
  CHECK_THAT(refusal(one("F32", "[2]", "[8]")), ContainsSubstring("two numbers"));
  CHECK_THAT(refusal(one("F32", "[1]", "[0,4]")), ContainsSubstring("4 bytes after the last tensor"));
  CHECK_THAT(refusal(one("F32", "[1]", "[4,8]")), ContainsSubstring("bytes [0, 4) of the data"));
  auto two = [&](const std::string& a, const std::string& b) {
    return file(R"({"a":)" + a + R"(,"b":)" + b + "}", "12345678");
  };
  CHECK_THAT(refusal(two(entry("U8", "[5]", "[0,5]"), entry("U8", "[4]", "[4,8]"))),
             ContainsSubstring("\"b\" at bytes [4, 8) of the data overlaps \"a\""));
  CHECK_THAT(refusal(two(entry("U8", "[8]", "[0,8]"), entry("U8", "[8]", "[0,8]"))), ContainsSubstring("overlaps"));
  CHECK_THAT(refusal(two(entry("U8", "[3]", "[0,3]"), entry("U8", "[4]", "[4,8]"))),
             ContainsSubstring("bytes [3, 4) of the data, before tensor \"b\""));
  CHECK_THAT(refusal(two(entry("U8", "[0]", "[5,5]"), entry("U8", "[8]", "[0,8]"))), ContainsSubstring("overlaps"));
}

TEST_CASE("safetensors: many tiny tensors in a small file are refused before they fill memory") {
  auto header = [](int count) {
    std::string text = "{";
    for (int i = 0; i < count; ++i) {
      text += (i ? ",\"" : "\"") + std::to_string(i) + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
    }
    return text + "}";
  };
  TempDir dir;
  write(dir / "a.safetensors", file(header(5000)));
  CHECK(ddp::load_safetensors(dir / "a.safetensors").size() == 5000);
  CHECK_THAT(refusal(file(header(100'000))), ContainsSubstring("so many in so small a file"));
}

TEST_CASE("safetensors: files that end while they are read, are directories, or are not there") {
  TempDir dir;
  const auto path = dir / "a.safetensors";
  ddp::save_safetensors(path, {{"a", torch::arange(100.0)}, {"b", torch::ones(3, torch::kBool)}});
  const std::string good = bytes_of(path);
  for (size_t size = 0; size < good.size(); size += 7) {
    write(path, good.substr(0, size));
    CHECK_THROWS_AS(ddp::load_safetensors(path), CheckpointError);
  }
  write(path, good + "x");
  CHECK_THROWS_AS(ddp::load_safetensors(path), CheckpointError);
  CHECK_THAT(message_of<CheckpointError>([&] { ddp::load_safetensors(dir / "absent.safetensors"); }),
             ContainsSubstring("absent.safetensors: cannot be opened: No such file"));
  CHECK_THAT(message_of<CheckpointError>([&] { ddp::safetensors_metadata(dir.path()); }),
             ContainsSubstring("directory"));

  // Short and interrupted reads change nothing.
  write(path, good);
  ddp::test::FaultyFileSystem slow;
  slow.longest_write = 10;
  slow.interruptions = 30;
  const ddp::io::SafetensorsFile file(slow, path, /*map=*/false);
  CHECK(file.tensor(file.header().entries[0]).equal(torch::arange(100.0)));
}
