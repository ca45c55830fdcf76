#include "io/pickle.h"

#include <caffe2/serialize/inline_container.h>
#include <torch/torch.h>

#include <cstring>
#include <fstream>

#include "ddp/atomic_file.h"
#include "ddp/error.h"
#include "io/crc32.h"
#include "io/torch_file.h"
#include "io/zip_reader.h"
#include "support/catch.h"
#include "support/spawn.h"
#include "unit/faulty_file_system.h"

namespace fs = std::filesystem;
using ddp::CheckpointError;
using ddp::State;
using ddp::test::ContainsSubstring;
using ddp::test::message_of;
using ddp::test::TempDir;
using namespace std::string_literals;

namespace {

void save(const fs::path& path, const State& state, const std::vector<std::string>& ordered = {}) {
  ddp::write_file_atomically(path,
                             [&](const ddp::Append& append) { ddp::io::write_torch_file(state, append, ordered); });
}
State load(const fs::path& path) { return ddp::io::read_torch_file(path.string(), false); }

State round_trip(const State& state) {
  TempDir dir;
  save(dir / "a.pt", state);
  return load(dir / "a.pt");
}

// A pickle without storages.
State unpickle(const std::string& body, const std::string& where = "test") {
  return ddp::io::unpickle(
      "\x80\x02"s + body, [](const std::string&) { return c10::Storage(); }, where);
}
std::string refusal(const std::string& body) {
  return message_of<CheckpointError>([&] { unpickle(body); });
}

// Pickled text, tuples of ints and the front of a tensor's call, as torch.save writes them.
std::string text(const std::string& value) { return "X"s + static_cast<char>(value.size()) + "\0\0\0"s + value; }
std::string int64(int64_t value) { return "\x8a\x08"s + std::string(reinterpret_cast<char*>(&value), 8); }
std::string tuple(const std::vector<int64_t>& values) {
  std::string out = "(";
  for (int64_t value : values) out += int64(value);
  return out + "t";
}
std::string storage(const std::string& key, int64_t elements) {
  return "("s + text("storage") + "ctorch\nFloatStorage\n" + text(key) + text("cpu") + int64(elements) + "tQ";
}
std::string tensor(const std::string& key, int64_t elements, int64_t offset, const std::vector<int64_t>& sizes,
                   const std::vector<int64_t>& strides) {
  return "ctorch._utils\n_rebuild_tensor_v2\n("s + storage(key, elements) + int64(offset) + tuple(sizes) +
         tuple(strides) + "\x89" + "ccollections\nOrderedDict\n)R" + "tR";
}

// A zip file with these records, by libtorch's own writer.
void write_records(const fs::path& path, const std::vector<std::pair<std::string, std::string>>& records) {
  caffe2::serialize::PyTorchStreamWriter writer(path.string());
  for (const auto& [name, data] : records) writer.writeRecord(name, data.data(), data.size());
  writer.writeEndOfFile();
}

std::string bytes_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
void write_bytes(const fs::path& path, const std::string& bytes) {
  fs::remove(path);  // ext4 flushes a file that is truncated and written again
  std::ofstream(path, std::ios::binary) << bytes;
}

}  // namespace

TEST_CASE("plain values come back with their types") {
  const State state = State::dict(
      {{"none", State()},
       {"bools", State::list({true, false})},
       {"ints", State::list({0, 1, 255, 256, 65535, 65536, -1, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN})},
       {"floats", State::list({0.0, -1.5, 1e300, std::numeric_limits<double>::infinity()})},
       {"text", State::list({"", "é€😀", "with\nlines", std::string(1000, 'x')})},
       {"bytes", State::list({State::Bytes{""}, State::Bytes{"\0\x7f\x80\xff"s}})},
       {"tuples", State::list({State::tuple({}), State::tuple({1}), State::tuple({1, 2}), State::tuple({1, 2, 3}),
                               State::tuple({1, 2, 3, 4})})},
       {"empty", State::list({State::list({}), State::dict()})},
       {"dict", State::dict({{3, "three"}, {"key", State::list({1})}})}});
  CHECK(round_trip(state) == state);
}

TEST_CASE("a long list of names is memoized past 255 entries") {
  State state = State::dict();
  State::List twice;
  for (int i = 0; i < 600; ++i) {
    state.set("name" + std::to_string(i), i);
    twice.items.emplace_back("name" + std::to_string(i));
  }
  state.set("names", State(twice));
  CHECK(round_trip(state) == state);
}

TEST_CASE("tensors of every dtype come back with dtype, shape, strides and values") {
  for (auto dtype :
       {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16, torch::kLong, torch::kInt, torch::kShort,
        torch::kChar, torch::kByte, torch::kBool, torch::kComplexFloat, torch::kComplexDouble, torch::kFloat8_e4m3fn,
        torch::kFloat8_e5m2, torch::kUInt16, torch::kUInt32, torch::kUInt64}) {
    CAPTURE(c10::toString(dtype));
    const auto values = torch::arange(12, torch::kFloat).view({3, 4}).to(dtype);
    const auto back = round_trip(State::dict({{"t", values}})).at("t").as_tensor();
    CHECK(back.scalar_type() == dtype);
    CHECK(back.sizes() == values.sizes());
    CHECK(std::memcmp(back.const_data_ptr(), values.const_data_ptr(), values.nbytes()) == 0);
  }
}

TEST_CASE("shapes and strides: 0-dim, empty, transposed, expanded, with an offset, conjugated") {
  const auto base = torch::arange(24.0).view({4, 6});
  const auto complex = torch::complex(base, base + 1);
  for (const auto& tensor :
       {torch::tensor(3.5), torch::empty({0}), torch::empty({2, 0, 3}), base.t(), base.slice(1, 1, 5, 2), base[2],
        base[0].expand({3, 6}), complex.conj(), torch::imag(complex.conj()), base.clone().requires_grad_()}) {
    const auto back = round_trip(State::dict({{"t", tensor}})).at("t").as_tensor();
    CHECK(back.sizes() == tensor.sizes());
    CHECK(back.equal(tensor.resolve_conj().resolve_neg()));
    CHECK_FALSE(back.requires_grad());
    if (!tensor.is_complex() && !tensor.is_neg()) CHECK(back.strides() == tensor.strides());
  }
}

TEST_CASE("views of one storage are one record and one storage again") {
  TempDir dir;
  const auto base = torch::arange(1000.0);
  save(dir / "a.pt", State::list({base, base.slice(0, 10, 20), base.view({10, 100}).t(), base}));
  CHECK(fs::file_size(dir / "a.pt") < 2 * 4000);
  const State back = load(dir / "a.pt");
  const auto& items = back.as_list();
  items[0].as_tensor().fill_(7);
  for (const auto& item : items) {
    CHECK(item.as_tensor().storage().is_alias_of(items[0].as_tensor().storage()));
    CHECK(item.as_tensor().eq(7).all().item<bool>());
  }
}

TEST_CASE("one storage seen as two dtypes keeps both values") {
  const auto floats = torch::arange(4.0);
  const auto ints = floats.view(torch::kInt);
  const State back = round_trip(State::list({floats, ints}));
  CHECK(back.as_list()[0].as_tensor().equal(floats));
  CHECK(back.as_list()[1].as_tensor().equal(ints));
}

TEST_CASE("what cannot be written is named with its place") {
  TempDir dir;
  auto message = [&](const State& state) { return message_of<CheckpointError>([&] { save(dir / "a.pt", state); }); };
  CHECK_THAT(message(State::dict({{"a", State::list({1, torch::eye(2).to_sparse()})}})),
             ContainsSubstring("[\"a\"][1]"));
  CHECK_THAT(message(State::dict({{"a", "\xff\xfe"}})), ContainsSubstring("UTF-8"));
  CHECK_THAT(message(State::dict({{"a", torch::Tensor()}})), ContainsSubstring("undefined"));
  State deep = State::list({});
  for (int i = 0; i < 101; ++i) deep = State::list({deep});
  CHECK_THAT(message(deep), ContainsSubstring("100"));
  CHECK(fs::is_empty(dir.path()));
}

TEST_CASE("reads and writes that are short or interrupted change nothing") {
  TempDir dir;
  const State state = State::dict({{"t", torch::arange(500.0)}, {"n", 3}});
  ddp::test::FaultyFileSystem slow;
  slow.longest_write = 100;
  slow.interruptions = 20;
  ddp::io::ScopedFileSystem scope(slow);
  save(dir / "a.pt", state);
  CHECK(load(dir / "a.pt") == state);
}

TEST_CASE("the checksum is that of zip files") {
  CHECK(ddp::io::crc32("123456789", 9) == 0xCBF43926u);  // the check value of CRC-32/ISO-HDLC
  const std::string text(1000, 'a');
  CHECK(ddp::io::crc32(text.data() + 33, 967, ddp::io::crc32(text.data(), 33)) == ddp::io::crc32(text.data(), 1000));
}

TEST_CASE("a pickle that asks for anything else is refused by name, with the byte") {
  const std::string call = "cos\nsystem\n" + text("touch /tmp/libddp_was_here") + "\x85R.";
  fs::remove("/tmp/libddp_was_here");
  CHECK_THAT(refusal(call), ContainsSubstring("os.system"));
  CHECK_THAT(refusal(call), ContainsSubstring("byte 2"));
  CHECK_FALSE(fs::exists("/tmp/libddp_was_here"));
  for (const char* name : {"builtins\neval", "__builtin__\neval", "torch\nload", "torch._utils\n_rebuild_sparse_tensor",
                           "collections\nCounter", "torch\nQInt8Storage", "numpy.core.multiarray\n_reconstruct",
                           "torch._tensor\n_rebuild_from_type_v2", "__main__\nNet"}) {
    CAPTURE(name);
    CHECK_THAT(refusal("c"s + name + "\n."), ContainsSubstring("refused"));
  }
  CHECK_THAT(refusal("ccollections\nOrderedDict\n."), ContainsSubstring("as a value"));
  CHECK_THAT(refusal("ctorch\nfloat8_e5m2\n)R."), ContainsSubstring("cannot be called"));
  CHECK_THAT(refusal("ccollections\nOrderedDict\n)\x81."), ContainsSubstring("0x81"));  // NEWOBJ
  CHECK_THAT(refusal("]}b."), ContainsSubstring("attributes"));
}

TEST_CASE("malformed pickles are errors") {
  for (const std::string& body : {""s,
                                  "N"s,
                                  "NN."s,
                                  "."s,
                                  "(."s,
                                  "(N."s,
                                  "t."s,
                                  "e."s,
                                  "]a."s,
                                  "Na."s,
                                  "NNa."s,
                                  "}Ns."s,
                                  "](NNu."s,
                                  "}(Nu."s,
                                  "h\x05."s,
                                  "j\x05\0\0\0."s,
                                  "q\x01."s,
                                  "X\xff\xff\xff\xff."s,
                                  "X\x02\0\0\0\xff\xff."s,
                                  "K"s,
                                  "G\0\0"s,
                                  "R."s,
                                  "NR."s,
                                  "NNR."s,
                                  "NQ."s,
                                  ")Q."s,
                                  "b."s,
                                  "c"s,
                                  "cos"s,
                                  "cos\n"s,
                                  "\x8a\x09\0\0\0\0\0\0\0\0\x01."s,
                                  "N.N"s,
                                  "}(NNu."s,
                                  "}(K\x01NK\x01Nu."s,
                                  "\x80\x04."s,
                                  "(NK\x01"s,
                                  "(](t."s}) {
    CAPTURE(body);
    CHECK_THROWS_AS(unpickle(body), CheckpointError);
  }
  CHECK_THROWS_AS(ddp::io::unpickle("\x80\x04N.", nullptr, "x"), CheckpointError);
  CHECK(unpickle("\x8a\x01\xff.") == State(-1));
  CHECK(unpickle("\x8a\x00."s) == State(0));
  CHECK(unpickle("\x8a\x09\xff\xff\xff\xff\xff\xff\xff\x7f\x00."s) == State(INT64_MAX));
}

TEST_CASE("bombs: nesting, lists of lists of lists, a list in itself") {
  CHECK_THAT(refusal(std::string(100'000, '(') + "."), ContainsSubstring("unused"));
  CHECK_THAT(refusal(std::string(50'000, ']') + std::string(49'999, 'a') + "."), ContainsSubstring("100 levels"));
  CHECK_THAT(refusal("]q\x01h\x01"
                     "a."),
             ContainsSubstring("100 levels"));
  std::string laughs = "]q\0"s;
  for (int level = 1; level < 30; ++level) {
    laughs += "](";
    for (int i = 0; i < 10; ++i) laughs += "h"s + static_cast<char>(level - 1);
    laughs += "eq"s + static_cast<char>(level);
  }
  laughs = "(" + laughs + "t.";
  CHECK_THAT(refusal(laughs), ContainsSubstring("without bound"));
}

TEST_CASE("tensors that do not fit their storage are refused") {
  TempDir dir;
  const std::string data(16, '\0');  // 4 floats
  auto outcome = [&](const std::string& body) {
    write_records(dir / "a.pt", {{"data.pkl", "\x80\x02" + body + "."}, {"byteorder", "little"}, {"data/0", data}});
    return load(dir / "a.pt");
  };
  CHECK(outcome(tensor("0", 4, 0, {2, 2}, {2, 1})).as_tensor().numel() == 4);
  CHECK(outcome(tensor("0", 4, 4, {0}, {1})).as_tensor().numel() == 0);
  CHECK(outcome(tensor("0", 4, 5, {1, 0}, {3, 1})).as_tensor().numel() == 0);  // as PyTorch writes
  const int64_t big = int64_t{1} << 62;
  struct Row {
    int64_t offset;
    std::vector<int64_t> sizes, strides;
  };
  for (const Row& row : {Row{0, {5}, {1}}, Row{1, {4}, {1}}, Row{0, {2, 2}, {3, 2}}, Row{-1, {1}, {1}},
                         Row{0, {-1}, {1}}, Row{0, {2}, {-1}}, Row{0, {big, big}, {0, 0}}, Row{0, {2}, {big}},
                         Row{big, {1}, {1}}, Row{0, {4}, {}}, Row{0, {big}, {0}}, Row{INT64_MAX, {2}, {1}}}) {
    CHECK_THAT(message_of<CheckpointError>([&] { outcome(tensor("0", 4, row.offset, row.sizes, row.strides)); }),
               ContainsSubstring("does not fit its storage"));
  }
  CHECK_THAT(message_of<CheckpointError>([&] { outcome(tensor("0", 5, 0, {1}, {1})); }), ContainsSubstring("16 bytes"));
  CHECK_THROWS_AS(outcome(tensor("0", -1, 0, {1}, {1})), CheckpointError);
  CHECK_THAT(message_of<CheckpointError>([&] { outcome(tensor("7", 4, 0, {1}, {1})); }),
             ContainsSubstring("data/7 is missing"));
  CHECK_THAT(message_of<CheckpointError>([&] { outcome(storage("0", 4)); }), ContainsSubstring("without a tensor"));
}

TEST_CASE("damaged files: every byte cut, flipped payloads, appended bytes, missing records") {
  TempDir dir;
  const State state = State::dict({{"a", torch::arange(40.0)}, {"b", "text"}});
  save(dir / "a.pt", state);
  const std::string good = bytes_of(dir / "a.pt");
  REQUIRE(load(dir / "a.pt") == state);

  for (size_t length = 0; length < good.size(); ++length) {
    write_bytes(dir / "cut.pt", good.substr(0, length));
    CHECK_THROWS_AS(load(dir / "cut.pt"), CheckpointError);
  }
  write_bytes(dir / "long.pt", good + "x");
  CHECK_THROWS_AS(load(dir / "long.pt"), CheckpointError);
  write_bytes(dir / "zeros.pt", std::string(good.size(), '\0'));
  CHECK_THROWS_AS(load(dir / "zeros.pt"), CheckpointError);

  ddp::io::ZipReader zip(ddp::io::file_system(), (dir / "a.pt").string(), false);
  for (const auto& record : zip.records()) {
    for (uint64_t i = 0; i < record.size; ++i) {
      std::string bad = good;
      bad[record.offset + i] ^= 0x10;
      write_bytes(dir / "bad.pt", bad);
      CHECK_THAT(message_of<CheckpointError>([&] { load(dir / "bad.pt"); }), ContainsSubstring(record.name));
    }
  }
  // No byte of header or directory may end in anything but an error or the same values.
  for (size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] ^= 0x01;
    write_bytes(dir / "bad.pt", bad);
    State back = state;
    try {
      back = load(dir / "bad.pt");
    } catch (const CheckpointError&) {
    }
    CHECK(back == state);
  }

  write_records(dir / "none.pt", {{"byteorder", "little"}});
  CHECK_THAT(message_of<CheckpointError>([&] { load(dir / "none.pt"); }), ContainsSubstring("data.pkl is missing"));
  write_records(dir / "big.pt", {{"data.pkl", "\x80\x02N."}, {"byteorder", "big"}});
  CHECK_THAT(message_of<CheckpointError>([&] { load(dir / "big.pt"); }), ContainsSubstring("big-endian"));
  CHECK_THAT(message_of<CheckpointError>([&] { load(dir / "absent.pt"); }), ContainsSubstring("No such file"));
  CHECK_THAT(message_of<CheckpointError>([&] { load(dir.path()); }), ContainsSubstring("directory"));
}

TEST_CASE("compressed records are refused, whatever size they claim") {
  TempDir dir;
  {
    caffe2::serialize::PyTorchStreamWriter writer((dir / "a.pt").string());
    writer.writeRecord("data.pkl", "\x80\x02N.", 4);
    const std::string zeros(1 << 20, '\0');
    writer.writeRecord("data/0", zeros.data(), zeros.size(), /*compress=*/true);
    writer.writeEndOfFile();
  }
  CHECK_THAT(message_of<CheckpointError>([&] { load(dir / "a.pt"); }), ContainsSubstring("compressed"));
}

TEST_CASE("a failing writer leaves no file, whichever call fails") {
  const State state = State::dict({{"t", torch::arange(50.0)}});
  for (int k = 1; k < 100; ++k) {
    TempDir dir;
    ddp::test::FaultyFileSystem faulty;
    faulty.fail_at = k;
    faulty.error = ENOSPC;
    bool failed = false;
    {
      ddp::io::ScopedFileSystem scope(faulty);
      try {
        save(dir / "a.pt", state);
      } catch (const CheckpointError&) {
        failed = true;
      }
    }
    if (!failed) {
      CHECK(k > 10);  // there are that many calls before the file is there
      break;
    }
    if (faulty.calls.back() != "fsync directory") CHECK(fs::is_empty(dir.path()));
  }
}
