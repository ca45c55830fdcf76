// The program in the README and in ddp.h is the one that compiles: examples/tutorial.cpp between its marks.
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "support/catch.h"

namespace {

std::string read(const std::string& path) {
  const auto root = std::filesystem::path(LIBDDP_TEST_DATA) / "../..";
  std::ifstream in(root / path);
  REQUIRE(in.good());
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

std::string between(const std::string& text, const std::string& begin, const std::string& end) {
  const auto from = text.find(begin);
  REQUIRE(from != std::string::npos);
  const auto to = text.find(end, from + begin.size());
  REQUIRE(to != std::string::npos);
  return text.substr(from + begin.size(), to - from - begin.size());
}

// Lines without indentation, comment marks and the alignment in front of a comment at their end.
std::string lines_of(const std::string& text) {
  std::istringstream in(text);
  std::string normal;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("//")) line.erase(0, 2);
    const auto first = line.find_first_not_of(' ');
    if (first == std::string::npos) continue;
    std::string packed;
    for (const char c : line.substr(first)) {
      if (c != ' ' || packed.back() != ' ') packed += c;
    }
    normal += packed + "\n";
  }
  return normal;
}

}  // namespace

TEST_CASE("the README and ddp.h show the program of examples/tutorial.cpp") {
  const auto program = lines_of(between(read("examples/tutorial.cpp"), "// [tutorial]\n", "// [/tutorial]"));
  REQUIRE(program.size() > 1000);
  CHECK(lines_of(between(read("README.md"), "<!-- snippet: examples/tutorial.cpp -->\n```cpp\n", "int main")) ==
        program);
  CHECK(lines_of(between(read("libddp/include/ddp/ddp.h"), "it makes possible:\n", "//   int main")) == program);
}
