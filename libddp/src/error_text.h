// The message of an exception as people want it.
#pragma once

#include <exception>
#include <string>

namespace ddp::detail {

/// c10::Error without its C++ backtrace, one line; what() of any other.
std::string error_text(const std::exception& error);
std::string error_text(const std::exception_ptr& error);

}  // namespace ddp::detail
