#include "error_text.h"

#include <c10/util/Exception.h>

namespace ddp::detail {

std::string error_text(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  std::string text = c10_error != nullptr ? c10_error->what_without_backtrace() : error.what();
  // Messages of errors that crossed a future carry the backtrace in their text.
  if (const auto cut = text.find("\nException raised from"); cut != std::string::npos) text.resize(cut);
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text;
}

std::string error_text(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return error_text(e);
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace ddp::detail
