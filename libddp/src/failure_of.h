#pragma once

#include <exception>
#include <string>

namespace ddp::detail {

/// The text of what an action throws, empty when it throws nothing. For actions that do not communicate: every rank
/// then comes to tell the others.
template <class Action>
std::string failure_of(Action action) {
  try {
    action();
  } catch (const std::exception& error) {
    return *error.what() ? error.what() : "an exception without a message";
  } catch (...) {
    return "an exception that is no std::exception";
  }
  return "";
}

}  // namespace ddp::detail
