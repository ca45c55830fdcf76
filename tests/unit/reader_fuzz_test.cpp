// Hostile files: mutations of good and bad ones from fixed seeds, and those of row C12 of the reliability plan under a
// limit of memory. LIBDDP_LONG=1 goes on for LIBDDP_FUZZ_SECONDS (600) per reader.
#include <caffe2/serialize/inline_container.h>
#include <malloc.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <set>

#include "fuzz/targets.h"
#include "io/zip_reader.h"
#include "support/catch.h"
#include "support/spawn.h"

namespace fs = std::filesystem;
using ddp::State;
using ddp::fuzz::Outcome;
using namespace std::string_literals;

namespace {

using Seeds = std::vector<std::string>;

std::string bytes_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string little_endian(uint64_t value, size_t size = 8) {
  return std::string(reinterpret_cast<const char*>(&value), size);
}

// --- mutations

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  size_t below(size_t n) { return n == 0 ? 0 : random_() % n; }
  const std::string& one_of(const Seeds& seeds) { return seeds[below(seeds.size())]; }

  std::string mutate(std::string bytes, const Seeds& seeds, const std::string& alphabet) {
    for (size_t n = below(3) == 0 ? 1 + below(4) : 1; n > 0; --n) bytes = step(std::move(bytes), seeds, alphabet);
    return bytes;
  }

 private:
  std::string step(std::string bytes, const Seeds& seeds, const std::string& alphabet) {
    static const uint64_t kNumbers[] = {0,
                                        1,
                                        2,
                                        0x7f,
                                        0x80,
                                        0xff,
                                        0x7fff,
                                        0xffff,
                                        0x7fffffff,
                                        0x80000000,
                                        0xffffffff,
                                        uint64_t{1} << 62,
                                        uint64_t{1} << 63,
                                        UINT64_MAX,
                                        UINT64_MAX - 7};
    const size_t at = below(bytes.size() + 1), size = below(std::min<size_t>(bytes.size() - at + 1, 40));
    switch (below(10)) {
      case 0:
        if (!bytes.empty()) bytes[below(bytes.size())] ^= static_cast<char>(1 << below(8));
        return bytes;
      case 1:
        if (!bytes.empty()) bytes[below(bytes.size())] = static_cast<char>(below(256));
        return bytes;
      case 2:
        return bytes.substr(0, at);
      case 3:
        return bytes.erase(at, size);
      case 4:
        return bytes.insert(below(bytes.size() + 1), bytes.substr(at, size));
      case 5: {
        const size_t width = size_t{1} << below(4);
        const std::string number = little_endian(kNumbers[below(std::size(kNumbers))], width);
        return bytes.replace(at, std::min(width, bytes.size() - at), number);
      }
      case 6: {  // the front of one and the back of another
        const std::string& other = one_of(seeds);
        return bytes.substr(0, at) + other.substr(below(other.size() + 1));
      }
      case 7:  // what the format is made of
        return bytes.insert(at, 1, alphabet[below(alphabet.size())]);
      case 8:
        if (!bytes.empty()) bytes[below(bytes.size())] = alphabet[below(alphabet.size())];
        return bytes;
      default: {  // numbers in text
        const size_t digit = bytes.find_first_of("0123456789", at);
        if (digit == std::string::npos) return bytes;
        const size_t end = bytes.find_first_not_of("0123456789", digit);
        return bytes.replace(digit, std::min(end, bytes.size()) - digit,
                             std::to_string(kNumbers[below(std::size(kNumbers))]));
      }
    }
  }

  std::mt19937_64 random_;
};

// Runs input number 0, 1, ...; each depends on its number only, so that a failure can be had again.
void fuzz(const char* name, uint64_t count, const std::function<std::string(Mutator&)>& input,
          const std::function<Outcome(const std::string&)>& read, size_t kinds_expected) {
  const bool is_long = std::getenv("LIBDDP_LONG") != nullptr;
  const char* given = std::getenv("LIBDDP_FUZZ_SECONDS");
  const std::chrono::duration<double> limit(is_long ? (given ? std::atof(given) : 600.0) : 0.0);
  const auto start = std::chrono::steady_clock::now();
  uint64_t accepted = 0, done = 0;
  std::set<std::string> kinds;  // of errors: messages without what varies
  double slowest = 0;
  for (; done < count || std::chrono::steady_clock::now() - start < limit; ++done) {
    Mutator mutator(done);
    const std::string bytes = input(mutator);
    CAPTURE(name, done);
    const auto before = std::chrono::steady_clock::now();
    const Outcome outcome = read(bytes);
    slowest = std::max(slowest, std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count());
    if (outcome.empty()) {
      ++accepted;
      continue;
    }
    std::string kind;
    for (char c : outcome) {
      if (c >= 'a' && c <= 'z') kind += c;
    }
    if (kinds.size() < 10'000) kinds.insert(kind.substr(0, 60));
  }
  std::printf("%s: %llu inputs, %llu of them read, %zu kinds of errors, the slowest took %.1f ms\n", name,
              static_cast<unsigned long long>(done), static_cast<unsigned long long>(accepted), kinds.size(),
              1e3 * slowest);
  // Inputs that are all refused at the door, or all read, test nothing.
  CHECK(accepted > done / 200);
  CHECK(accepted < done * 9 / 10);
  CHECK(kinds.size() >= kinds_expected);
  CHECK(slowest < 10);
}

// --- seeds

State sample() {
  const auto base = torch::arange(12.0).view({3, 4});
  return State::dict({{"epoch", 1},
                      {"loss", 0.5},
                      {"none", State()},
                      {"flag", true},
                      {"big", int64_t{1} << 40},
                      {"text", "é€"},
                      {"bytes", State::Bytes{"\0\x80\xff"s}},
                      {"tuple", State::tuple({1, 2.5, "x", -1})},
                      {"list", State::list({1, State::list({}), State::dict({{7, "seven"}})})},
                      {"model_state_dict", State::dict({{"w", base}, {"t", base.t()}, {"row", base[0]}})},
                      {"half", torch::ones(2, torch::kHalf)},
                      {"float8", torch::ones(2, torch::kFloat8_e4m3fn)},
                      {"complex", torch::ones(2, torch::kComplexFloat)},
                      {"empty", torch::empty({2, 0})}});
}

std::string torch_file(const State& state) {
  std::string bytes;
  ddp::io::write_torch_file(state,
                            [&](const void* data, size_t size) { bytes.append(static_cast<const char*>(data), size); },
                            {"model_state_dict"});
  return bytes;
}

using Records = std::vector<std::pair<std::string, std::string>>;

std::string zip(const Records& records) {
  std::string bytes;
  {
    caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, size_t size) {
      bytes.append(static_cast<const char*>(data), size);
      return size;
    });
    for (const auto& [name, data] : records) writer.writeRecord(name, data.empty() ? "" : data.data(), data.size());
    writer.writeEndOfFile();
  }
  return bytes;
}

Records records_of(const std::string& file) {
  const ddp::fuzz::MemoryFile memory(file);
  const ddp::io::ZipReader zip(ddp::io::file_system(), memory.path(), /*follow=*/true);
  Records records;
  for (const auto& record : zip.records()) {
    std::string data(record.size, '\0');
    zip.read(record, data.data());
    if (record.name != "version" && !record.name.starts_with(".data/")) records.emplace_back(record.name, data);
  }
  return records;
}

std::string pickle_of(const std::string& file) {
  for (const auto& [name, data] : records_of(file)) {
    if (name == "data.pkl") return data;
  }
  throw std::runtime_error("no data.pkl");
}

std::string python_file() { return bytes_of(std::string(LIBDDP_TEST_DATA) + "/checkpoint_python.pt"); }

// Pickles of few bytes that want much, as far as they can be had small.
Seeds bad_pickles() {
  std::string laughs = "\x80\x02(]q\0"s;
  for (int level = 1; level < 12; ++level) {
    laughs += "](";
    for (int i = 0; i < 10; ++i) laughs += "h"s + static_cast<char>(level - 1);
    laughs += "eq"s + static_cast<char>(level);
  }
  return {"\x80\x02]q\0h\0a."s,
          laughs + "t.",
          "\x80\x02"s + std::string(300, ']') + std::string(299, 'a') + ".",
          "\x80\x02"
          "cos\nsystem\nX\x02\0\0\0ls\x85R."s,
          "\x80\x02"
          "c__builtin__\nset\n](K\x01K\x02"
          "e\x85R."s,
          "\x80\x02"
          "ctorch\nSize\n(K\x02K\x03t\x85R."s,
          "\x80\x02"
          "c_codecs\nencode\nX\x02\0\0\0\xc3\xbfX\x06\0\0\0latin1\x86R."s};
}

const std::string kOpcodes = "\x80.(NJKMGX\x8a\x88\x89)\x85\x86\x87t]ae}suqrhjcRbQ\0\1\2\3"s;

std::string safetensors(const std::string& header, const std::string& data) {
  return little_endian(header.size()) + header + data;
}

Seeds safetensors_headers() {
  return {
      R"({"__metadata__":{"format":"pt","a":"b"},"d":{"dtype":"I64","shape":[],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[1,2],"data_offsets":[8,16]},"b":{"dtype":"BF16","shape":[3],"data_offsets":[16,22]},"z":{"dtype":"BOOL","shape":[2],"data_offsets":[22,24]}})",
      R"({"x":{"dtype":"U8","shape":[24],"data_offsets":[0,24]}}   )",
      R"({"e":{"dtype":"F64","shape":[0,3],"data_offsets":[0,0]},"x":{"dtype":"F8_E5M2","shape":[4,6],"data_offsets":[0,24]}})",
      "{}"};
}

}  // namespace

TEST_CASE("fuzz: pickles are read or refused") {
  Seeds seeds = bad_pickles();
  for (const State& state : {sample(), State(), State::list({1, 2}), State::dict({{"t", torch::ones(4)}})}) {
    seeds.push_back(ddp::io::pickle(state, {"model_state_dict"}).data);
  }
  seeds.push_back(pickle_of(python_file()));
  CHECK(ddp::fuzz::read_pickle(seeds.back()).find("has 64 bytes") == std::string::npos);
  fuzz(
      "pickles", 25'000, [&](Mutator& mutator) { return mutator.mutate(mutator.one_of(seeds), seeds, kOpcodes); },
      ddp::fuzz::read_pickle, 40);
}

TEST_CASE("fuzz: .pt files are read or refused") {
  const Seeds seeds = {torch_file(sample()), torch_file(State::dict({{"t", torch::ones(4)}})), python_file()};
  std::vector<Records> contents;
  for (const std::string& seed : seeds) contents.push_back(records_of(seed));
  fuzz(
      ".pt files", 6'000,
      [&](Mutator& mutator) {
        // Half of them with checksums that are right, so that what is inside gets read.
        if (mutator.below(2) == 0) return mutator.mutate(mutator.one_of(seeds), seeds, "PK\1\2\3\4\5\6"s);
        Records records = contents[mutator.below(contents.size())];
        const size_t changed = mutator.below(2) == 0 ? 0 : mutator.below(records.size());
        auto& [name, data] = records[changed];
        if (mutator.below(8) == 0) {
          records.erase(records.begin() + static_cast<std::ptrdiff_t>(changed));
        } else {
          data = mutator.mutate(data, {data}, kOpcodes);
        }
        return zip(records);
      },
      ddp::fuzz::read_torch, 40);
}

TEST_CASE("fuzz: safetensors files are read or refused") {
  const Seeds headers = safetensors_headers();
  Seeds files = {bytes_of(std::string(LIBDDP_TEST_DATA) + "/safetensors_python.safetensors")};
  const std::string data(24, '\1');
  for (const std::string& header : headers) files.push_back(safetensors(header, header == "{}" ? "" : data));
  for (const std::string& file : files) REQUIRE(ddp::fuzz::read_safetensors(file).empty());
  uint64_t count = 0;
  fuzz(
      "safetensors", 25'000,
      [&](Mutator& mutator) {
        if (mutator.below(4) == 0) return mutator.mutate(mutator.one_of(files), files, "{}[],:\"0");
        const std::string header = mutator.mutate(mutator.one_of(headers), headers, "{}[],:\"0123456789");
        return safetensors(header, mutator.below(8) == 0 ? std::string(mutator.below(64), '\1') : data);
      },
      [&](const std::string& bytes) { return ddp::fuzz::read_safetensors(bytes, ++count % 2 == 0); }, 40);
}

// --- memory

namespace {

size_t data_segment() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "VmData:") {
      size_t kib = 0;
      status >> kib;
      return kib << 10;
    }
  }
  throw std::runtime_error("no VmData in /proc/self/status");
}

// Memory, private and writable, that the process may add.
void allow(size_t bytes) {
  ::malloc_trim(0);
  rlimit limit{};
  ::getrlimit(RLIMIT_DATA, &limit);
  limit.rlim_cur = bytes == SIZE_MAX ? limit.rlim_max : data_segment() + bytes;
  ::setrlimit(RLIMIT_DATA, &limit);
}

struct Hostile {
  std::string name;
  std::string bytes;
  bool is_readable = false;  // large, but honest
};

std::vector<Hostile> hostile_files() {
  auto pt = [](const std::string& body) {
    return zip({{"data.pkl", "\x80\x02" + body + "."}, {"byteorder", "little"}, {"data/0", std::string(64, '\1')}});
  };
  auto repeated = [](const std::string& text, size_t count) {
    std::string all;
    all.reserve(text.size() * count);
    for (size_t i = 0; i < count; ++i) all += text;
    return all;
  };
  auto text = [](const std::string& value) { return "X"s + little_endian(value.size(), 4) + value; };
  const std::string million(1 << 20, 'x');
  const std::string storage = "(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0000X\x03\0\0\0cpuK\x10tQ"s;
  std::string laughs = "]q\0"s;
  for (int level = 1; level < 30; ++level) {
    laughs += "](" + repeated("h"s + static_cast<char>(level - 1), 10) + "eq" + static_cast<char>(level);
  }
  std::vector<Hostile> all = {
      {"marks", pt(std::string(8 << 20, '('))},
      {"values", pt(std::string(8 << 20, 'N'))},
      {"nested lists", pt(std::string(8 << 20, ']'))},
      {"nested lists, closed", pt(std::string(4 << 20, ']') + std::string((4 << 20) - 1, 'a'))},
      {"empty dicts in a list", pt("](" + std::string(8 << 20, '}') + "e")},
      {"lists of lists of lists", pt("(" + laughs + "t")},
      {"a text again and again", pt("(" + text(million) + "q\0]("s + repeated("h\0"s, 1 << 20) + "et")},
      {"a text as key and value", pt("(" + text(million) + "q\0]("s + repeated("}h\0h\0s"s, 100'000) + "et")},
      {"bytes again and again",
       pt("(c_codecs\nencode\n" + text(million) + text("latin1") + "\x86Rq\0]("s + repeated("h\0"s, 1 << 20) + "et")},
      {"a tensor's flags again and again",
       pt("(ctorch._utils\n_rebuild_tensor_v2\n(" + storage + "K\0))\x89N}("s +
          repeated(text("neg") + "\x89", 100'000) + "utq\1ctorch._utils\n_rebuild_tensor_v2\nq\0]("s +
          repeated("h\0h\1R"s, 20'000) + "et")},
      {"memo entries", pt([] {
         std::string body = "N";
         for (uint32_t i = 0; i < (1 << 20); ++i) body += "r"s + little_endian(i, 4);
         return body;
       }()),
       true},
      {"tensors of one storage", pt("(ctorch._utils\n_rebuild_tensor_v2\nq\0("s + storage + "K\0))\x89}tq\1]("s +
                                    repeated("h\0h\1R"s, 1 << 20) + "et")},
      {"storages", pt("](" + storage + repeated(storage, 40'000) + "e")},
      {"a claim of 4 GiB of text", pt("X\xff\xff\xff\xff" + million)},
      {"a million floats, which are fine", pt("](" + repeated("G?\xf0\0\0\0\0\0\0"s, 1 << 20) + "e"), true},
  };
  {
    // A zip directory that claims 2^40 bytes for a stored record.
    std::string file = pt("N");
    const size_t entry = file.find("PK\1\2"s);
    for (size_t field : {size_t{20}, size_t{24}}) file.replace(entry + field, 4, "\xfe\xff\xff\xff");
    all.push_back({"a record larger than the file", file});
  }
  {
    Records records = {{"data.pkl", "\x80\x02N."}};
    for (int i = 0; i < 30'000; ++i) records.emplace_back("data/" + std::to_string(i), "");
    all.push_back({"thirty thousand records, which are fine", zip(records), true});
  }

  auto entries = [](int count) {
    std::string header = "{";
    for (int i = 0; i < count; ++i) {
      header += (i ? ",\"" : "\"") + std::to_string(i) + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
    }
    return header + "}";
  };
  all.push_back({"safetensors: a header of 2^63", little_endian(uint64_t{1} << 63) + "{}"});
  all.push_back({"safetensors: many tensors", safetensors(entries(300'000), "")});
  all.push_back({"safetensors: five thousand tensors, which are fine", safetensors(entries(5000), ""), true});
  all.push_back({"safetensors: one long name", safetensors("{\"" + std::string(16 << 20, 'a') + "\":", "")});
  all.push_back({"safetensors: one long number", safetensors("{\"a\":{\"shape\":[" + std::string(16 << 20, '1'), "")});
  all.push_back({"safetensors: many dimensions", safetensors("{\"a\":{\"shape\":[" + repeated("1,", 8 << 20), "")});
  all.push_back({"safetensors: nesting", safetensors("{\"a\":" + std::string(16 << 20, '['), "")});
  all.push_back({"safetensors: much metadata", safetensors(
                                                   [&] {
                                                     std::string header = "{\"__metadata__\":{";
                                                     for (int i = 0; i < 1'000'000; ++i)
                                                       header += (i ? ",\"" : "\"") + std::to_string(i) + "\":\"\"";
                                                     return header + "}}";
                                                   }(),
                                                   "")});
  all.push_back({"safetensors: texts of a mebibyte",
                 safetensors("{\"__metadata__\":{\"a\":\"" + std::string((1 << 20) - 2, 'b') + "\"}}", ""), true});
  return all;
}

}  // namespace

DDP_TEST_PROGRAM(read_hostile_files) {
  constexpr size_t kSpare = 16 << 20, kPerByteOfPickle = 16;
  bool ok = true;
  for (const Hostile& file : hostile_files()) {
    const bool is_safetensors = file.name.starts_with("safetensors");
    // The promise: the file's size and 16 MiB, for the pickle in a .pt file 16 times its size. A mapped file counts
    // as data for the kernel, though its pages are the file's.
    const size_t size = file.bytes.size();
    std::string result;
    const ddp::fuzz::MemoryFile memory(file.bytes);
    allow(size + kSpare + (is_safetensors ? size : kPerByteOfPickle * size));
    const auto start = std::chrono::steady_clock::now();
    try {
      result = ddp::fuzz::outcome_of(file.bytes, [&]() -> State {
        if (!is_safetensors) return ddp::io::read_torch_file(memory.path(), /*follow=*/true);
        State::List tensors;
        for (const auto& item : ddp::load_safetensors(memory.path())) tensors.items.emplace_back(item.value());
        return tensors;
      });
    } catch (const std::exception& error) {
      ok = false;
      result = "FAILED: "s + error.what();
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    allow(SIZE_MAX);
    if (result.empty() != file.is_readable || seconds.count() > 20) ok = false, result = "FAILED: " + result;
    std::printf("%s, %zu bytes, %.2f s: %.200s\n", file.name.c_str(), size, seconds.count(), result.c_str());
    std::fflush(stdout);
  }
  return ok ? 0 : 1;
}

TEST_CASE("hostile files take no more memory than they may, and no time") {
  const auto result =
      ddp::test::run_command(ddp::test::program("read_hostile_files"),
                             {.deadline = std::chrono::seconds(100), .env = {{"OMP_NUM_THREADS", "1"}}});
  INFO(result.describe());
  CHECK(result.ok());
}
