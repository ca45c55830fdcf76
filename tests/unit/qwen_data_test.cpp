// examples/qwen_pretrain: text as windows of bytes, the loss curve and its plot.
#include <torch/torch.h>

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>

#include "../../examples/qwen_pretrain/data.h"
#include "../../examples/qwen_pretrain/losses.h"
#include "../../examples/qwen_pretrain/plot.h"
#include "ddp/error.h"
#include "support/catch.h"

namespace {

using ddp::test::Approx;
using ddp::test::ContainsSubstring;
using ddp::test::message_of;
namespace fs = std::filesystem;

class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / ("qwen_data_" + std::to_string(::getpid()))) {
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  std::string write(const std::string& name, const std::string& text) const {
    fs::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name) << text;
    return (path_ / name).string();
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

std::string text_of(const torch::Tensor& tokens) {
  const auto bytes = tokens.to(torch::kUInt8).contiguous();
  return {reinterpret_cast<const char*>(bytes.data_ptr<uint8_t>()), static_cast<size_t>(bytes.numel())};
}

TEST_CASE("text is read in the order of paths, by extension, up to a limit") {
  const Folder folder;
  folder.write("b.txt", "bb");
  folder.write("a/z.h", "zz");
  folder.write("a.md", "aa");
  folder.write("c.hpp", "\xff\x80");
  folder.write("d.cpp", "dd");
  CHECK(text_of(qwen::read_text({folder.path()})) == "aazzbb\xff\x80");  // "a.md" < "a/z.h": '.' comes before '/'
  CHECK(text_of(qwen::read_text({folder.path() / "d.cpp", folder.path() / "b.txt"})) == "ddbb");
  CHECK(text_of(qwen::read_text({folder.path()}, /*limit=*/3)) == "aazz");
  CHECK_THAT(message_of<ddp::DataError>([&] { qwen::read_text({folder.path() / "none"}); }),
             ContainsSubstring("no such file"));
  fs::create_directories(folder.path() / "empty");
  CHECK_THAT(message_of<ddp::DataError>([&] { qwen::read_text({folder.path() / "empty"}); }),
             ContainsSubstring("no text"));
}

TEST_CASE("windows have stride seq and targets one token later") {
  const auto tokens = torch::arange(11, torch::kUInt8);
  qwen::Windows data(tokens, 3);
  REQUIRE(data.size() == 3u);  // the fourth would need token 12
  const auto batch = data.get_batch({2, 0});
  CHECK(torch::equal(batch.data, torch::tensor({{6, 7, 8}, {0, 1, 2}}, torch::kInt64)));
  CHECK(torch::equal(batch.target, torch::tensor({{7, 8, 9}, {1, 2, 3}}, torch::kInt64)));
  CHECK(qwen::Windows(tokens, 10).size() == 1u);
  CHECK_THROWS_AS(qwen::Windows(tokens, 11), ddp::DataError);
}

TEST_CASE("random tokens are the same for the same seed, whatever was drawn before") {
  torch::manual_seed(1);
  const auto a = qwen::random_tokens(100, 7, 42);
  torch::manual_seed(2);
  CHECK(torch::equal(a, qwen::random_tokens(100, 7, 42)));
  CHECK_FALSE(torch::equal(a, qwen::random_tokens(100, 7, 43)));
  CHECK(a.min().item<int>() == 0);
  CHECK(a.max().item<int>() == 6);
}

TEST_CASE("the loss of a step is the sum of its shares, and survives a checkpoint bit for bit") {
  const ddp::ProcessGroup alone;
  qwen::Losses losses;
  losses.add(torch::tensor(1.5), false);
  losses.add(torch::tensor(0.5), true);
  losses.add(torch::tensor(0.1), true);
  losses.reduce(alone);
  REQUIRE(losses.values().size() == 2);
  CHECK(losses.values()[0] == 2.0);
  CHECK(losses.values()[1] == static_cast<double>(0.1f));
  CHECK(losses.mean_since(1) == losses.values()[1]);
  CHECK(std::isnan(losses.mean_since(2)));

  qwen::Losses restored;
  restored.add(torch::tensor(9.0), true);  // forgotten by the load
  restored.load_state_dict(losses.state_dict());
  restored.reduce(alone);
  CHECK(restored.values() == losses.values());
}

TEST_CASE("the plot is an SVG whose curve and axes hold the values") {
  const auto svg = qwen::loss_plot({6, 4, NAN, 2}, "a < b & c");
  CHECK(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\""));
  CHECK(svg.ends_with("</svg>\n"));
  CHECK_THAT(svg, ContainsSubstring("a &lt; b &amp; c"));
  CHECK_THAT(svg, ContainsSubstring(">6</text>"));  // ticks at whole numbers
  CHECK_THAT(svg, ContainsSubstring(">2</text>"));
  const auto path = svg.substr(svg.find("#0969da"));
  CHECK(std::ranges::count(path.substr(0, path.find("/>")), 'M') == 2);  // the NaN parts the curve
  CHECK(svg.find("nan") == std::string::npos);
  for (const std::vector<double>& few : {std::vector<double>{}, {3.0}, {3.0, 3.0}, {INFINITY}}) {
    const auto plot = qwen::loss_plot(few, "");
    CHECK(plot.find("nan") == std::string::npos);
    CHECK(plot.find("inf") == std::string::npos);
  }
}

}  // namespace
