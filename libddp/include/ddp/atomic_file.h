// Files that are there whole or not at all, after a crash too.
//
//   ddp::write_file_atomically("runs/a/notes.txt", [&](const ddp::Append& append) {
//     append(text.data(), text.size());
//   });
//   ddp::swap_symlink("runs/a/latest", "notes.txt");
//
// Order of writes: a temporary beside the target, fsync, close, rename, fsync of the directory.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace ddp {

/// Adds `size` bytes to the end of the file. Throws CheckpointError when they cannot be written, all of them.
using Append = std::function<void(const void* data, size_t size)>;

/// Writes `path` by what `writer` appends. A reader of `path` sees the old content or the new, never a part;
/// when this returns, the new content survives a power loss. `temporary` names the file that is written
/// meanwhile, in the same directory: `<temporary>_tmp.<nonce><extension of path>`; the default is the stem of
/// `path`.
///
/// On any failure, the writer's own exceptions too, the temporary is removed and `path` is what it was (if
/// only the last step fails, the fsync of the directory, it is the new file already, whole but perhaps not
/// durable). Throws CheckpointError naming path, operation and reason. A failed fsync is never tried again:
/// the kernel may have dropped the data and would answer "fine".
void write_file_atomically(const std::filesystem::path& path, const std::function<void(const Append&)>& writer,
                           const std::string& temporary = "");

/// Makes `link` a symbolic link to `target`, in one step whether it exists or not; durable when it returns.
/// The new link is made as `.latest.<nonce>` and renamed. Throws CheckpointError as above, for a directory in
/// the place of `link` too.
void swap_symlink(const std::filesystem::path& link, const std::string& target);

/// True for the name of a temporary that the two functions above make: `<temporary>_tmp.<nonce><extension>`
/// or
/// `.latest.<nonce>`, the nonce 16 hexadecimal digits. What a killed process leaves behind can be found by
/// it.
bool is_temporary_name(std::string_view name, std::string_view temporary, std::string_view extension);

/// Makes `path` and its parents where they are missing, durably. Throws CheckpointError.
void make_directories(const std::filesystem::path& path);

}  // namespace ddp
