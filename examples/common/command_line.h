// A command line into the options of an example, by Boost.Program_options.
#pragma once

#include <boost/program_options.hpp>
#include <cstdlib>
#include <iostream>
#include <string>

#include "ddp/error.h"

namespace example {

/// Fills the variables that `options` is bound to. `--help` prints them and ends the program. Throws ddp::ConfigError
/// for an option or a value that cannot be used.
inline void parse_command_line(int argc, char** argv, boost::program_options::options_description options) {
  namespace po = boost::program_options;
  options.add_options()("help", "this text");
  po::variables_map values;
  try {
    constexpr int kStyle = po::command_line_style::unix_style & ~po::command_line_style::allow_guessing;
    po::store(po::command_line_parser(argc, argv).options(options).positional({}).style(kStyle).run(), values);
    if (values.count("help")) {
      std::cout << options;
      std::exit(EXIT_SUCCESS);
    }
    po::notify(values);
  } catch (const po::error& error) {
    throw ddp::ConfigError(std::string(error.what()) + "; --help lists the options");
  }
}

/// An option bound to `variable`, whose value now is the default.
template <class T>
auto* option(T& variable) {
  return boost::program_options::value(&variable)->default_value(variable);
}

}  // namespace example
