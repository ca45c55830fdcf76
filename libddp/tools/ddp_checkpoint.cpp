// Looks into checkpoints: ddp_checkpoint ls|show|verify|diff|export. `ddp_checkpoint --help` tells the rest.
#include <algorithm>
#include <boost/program_options.hpp>
#include <exception>
#include <iostream>

#include "checkpoint/commands.h"
#include "checkpoint/contents.h"
#include "error_text.h"

namespace {

namespace po = boost::program_options;

constexpr const char* kHelp =
    "usage: ddp_checkpoint COMMAND ... [--json]\n"
    "\n"
    "  ls DIR                    the checkpoints of a directory: step, size, valid or why not\n"
    "      --quick               does not read the tensors\n"
    "  show FILE                 keys, dtypes, shapes, step, epoch, world size\n"
    "  verify FILE...            reads all of a file: directory, checksums, every value\n"
    "  diff A B                  which values differ, and by how much\n"
    "      --only PREFIX         keys that begin with it, such as model_state_dict\n"
    "      --tolerance X         elements that differ by no more count as equal (0: every bit counts)\n"
    "  export FILE OUT           the model's weights as OUT, a .safetensors file\n"
    "      --key KEY             the dict to export (model_state_dict)\n"
    "      --refuse-tied         an error for tied weights, which are otherwise written once\n"
    "\n"
    "  --json                    for programs\n"
    "\n"
    "FILE is a checkpoint, any file of torch.save's with plain data, or safetensors.\n"
    "Exit code: 0 valid, equal, done; 1 not valid, not equal; 2 wrong usage or a file that cannot be read.\n";

struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Arguments {
  std::vector<std::string> paths;
  bool json = false;
};

// Options of a command and `least` to `most` paths.
Arguments parse(const std::vector<std::string>& words, po::options_description options, size_t least, size_t most) {
  Arguments arguments;
  options.add_options()("json", po::bool_switch(&arguments.json));
  options.add_options()("path", po::value(&arguments.paths));
  po::positional_options_description positional;
  positional.add("path", -1);
  constexpr int kStyle = po::command_line_style::unix_style & ~po::command_line_style::allow_guessing;
  po::variables_map values;
  po::store(po::command_line_parser(words).options(options).positional(positional).style(kStyle).run(), values);
  po::notify(values);
  if (arguments.paths.size() < least || arguments.paths.size() > most) {
    const std::string expected = least == most ? std::to_string(least) : std::to_string(least) + " or more";
    throw UsageError("expected " + expected + " of paths, found " + std::to_string(arguments.paths.size()));
  }
  return arguments;
}

int run(const std::string& command, const std::vector<std::string>& words) {
  constexpr size_t kAny = SIZE_MAX;
  po::options_description options;
  if (command == "ls") {
    tool::ListOptions list;
    options.add_options()("quick", po::bool_switch(&list.quick));
    const Arguments arguments = parse(words, options, 1, 1);
    list.json = arguments.json;
    return tool::list(arguments.paths[0], list);
  }
  if (command == "show") {
    const Arguments arguments = parse(words, options, 1, 1);
    return tool::show(arguments.paths[0], arguments.json);
  }
  if (command == "verify") {
    const Arguments arguments = parse(words, options, 1, kAny);
    return tool::verify_files(arguments.paths, arguments.json);
  }
  if (command == "diff") {
    tool::DiffOptions diff;
    options.add_options()("only", po::value(&diff.only))("tolerance", po::value(&diff.tolerance));
    const Arguments arguments = parse(words, options, 2, 2);
    if (!(diff.tolerance >= 0)) throw UsageError("--tolerance is not negative");
    diff.json = arguments.json;
    return tool::diff(arguments.paths[0], arguments.paths[1], diff);
  }
  if (command == "export") {
    tool::ExportOptions exported;
    bool refuse_tied = false;
    options.add_options()("key", po::value(&exported.key))("refuse-tied", po::bool_switch(&refuse_tied));
    const Arguments arguments = parse(words, options, 2, 2);
    exported.drop_tied = !refuse_tied;
    exported.json = arguments.json;
    return tool::export_weights(arguments.paths[0], arguments.paths[1], exported);
  }
  throw UsageError("there is no command " + command);
}

}  // namespace

void tool::print(const nlohmann::ordered_json& json) {
  std::cout << json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << '\n';
}

int main(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  if (std::any_of(words.begin(), words.end(), [](const auto& word) { return word == "--help" || word == "-h"; })) {
    std::cout << kHelp;
    return tool::kYes;
  }
  auto fail = [](const std::string& text) {
    std::cerr << "ddp_checkpoint: " << text << '\n';
    return tool::kNoAnswer;
  };
  if (words.empty()) return fail("expected a command: ls, show, verify, diff or export; --help tells more");
  const std::string command = words.front();
  words.erase(words.begin());
  try {
    const int code = run(command, words);
    std::cout.flush();
    return std::cout ? code : fail("writing the output failed");
  } catch (const UsageError& error) {
    return fail(command + ": " + error.what() + "; --help tells more");
  } catch (const po::error& error) {
    return fail(command + ": " + error.what() + "; --help tells more");
  } catch (const tool::Failure& failure) {
    return fail(failure.what());
  } catch (const std::exception& error) {
    return fail(ddp::detail::error_text(error));
  }
}
