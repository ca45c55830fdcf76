// UTF-8, as far as pickle's text needs it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace ddp::io {

/// True for UTF-8; surrogates are let through, as Python's pickle does.
bool is_utf8(std::string_view text);

/// Bytes as text in which each is one character (latin-1), and back: nothing where a character is above 255.
std::string latin1_to_utf8(std::string_view bytes);
std::optional<std::string> utf8_to_latin1(std::string_view text);

}  // namespace ddp::io
