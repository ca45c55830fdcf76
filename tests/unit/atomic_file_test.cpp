#include "ddp/atomic_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>

#include "ddp/error.h"
#include "support/catch.h"
#include "support/spawn.h"
#include "unit/faulty_file_system.h"

namespace fs = std::filesystem;
using ddp::test::ContainsSubstring;
using ddp::test::FaultyFileSystem;
using ddp::test::message_of;
using ddp::test::TempDir;

namespace {

void write(const fs::path& path, const std::string& text) {
  ddp::write_file_atomically(path, [&](const ddp::Append& append) {
    append(text.data(), text.size() / 2);
    append(text.data() + text.size() / 2, text.size() - text.size() / 2);
  });
}

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::set<std::string> names(const fs::path& directory) {
  std::set<std::string> found;
  for (const auto& entry : fs::directory_iterator(directory)) found.insert(entry.path().filename());
  return found;
}

}  // namespace

TEST_CASE("a file is written whole, replaced whole, and leaves nothing beside it") {
  TempDir dir;
  write(dir / "a.txt", "first");
  CHECK(read(dir / "a.txt") == "first");
  write(dir / "a.txt", "second, longer");
  CHECK(read(dir / "a.txt") == "second, longer");
  CHECK(names(dir.path()) == std::set<std::string>{"a.txt"});
}

TEST_CASE("the order of writes: file, fsync, close, rename, fsync of the directory") {
  TempDir dir;
  FaultyFileSystem watched;
  ddp::io::ScopedFileSystem scope(watched);
  write(dir / "a.txt", "x!");
  CHECK(watched.calls ==
        std::vector<std::string>{"create", "write", "write", "fsync", "close", "rename", "fsync directory"});
  watched.calls.clear();
  ddp::swap_symlink(dir / "link", "a.txt");
  CHECK(watched.calls == std::vector<std::string>{"symlink", "rename", "fsync directory"});
}

TEST_CASE("short writes and interruptions give the same file") {
  TempDir dir;
  std::string text(1000, '\0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 7);
  FaultyFileSystem slow;
  slow.longest_write = 3;
  slow.interruptions = 100;
  ddp::io::ScopedFileSystem scope(slow);
  write(dir / "a.bin", text);
  CHECK(read(dir / "a.bin") == text);
}

TEST_CASE("every call that fails: the old file stands, the temporary is gone, the error says which and why") {
  const std::vector<std::string> operations = {"creating", "write", "write", "fsync", "close", "rename"};
  for (int error : {EIO, ENOSPC, EDQUOT, EACCES}) {
    for (bool forever : {false, true}) {
      for (size_t k = 1; k <= operations.size(); ++k) {
        TempDir dir;
        write(dir / "a.txt", "old");
        FaultyFileSystem faulty;
        faulty.fail_at = static_cast<int>(k);
        faulty.error = error;
        faulty.forever = forever;
        std::string message;
        {
          ddp::io::ScopedFileSystem scope(faulty);
          message = message_of<ddp::CheckpointError>([&] { write(dir / "a.txt", "new"); });
        }
        CHECK_THAT(message, ContainsSubstring((dir / "a.txt").string()));
        CHECK_THAT(message, ContainsSubstring(operations[k - 1]));
        CHECK_THAT(message, ContainsSubstring(std::strerror(error)));
        CHECK(read(dir / "a.txt") == "old");
        CHECK(names(dir.path()) == std::set<std::string>{"a.txt"});
        CHECK(std::count(faulty.calls.begin(), faulty.calls.end(), "fsync") <= 1);  // never tried again
      }
    }
  }
}

TEST_CASE("a writer's own exception removes the temporary") {
  TempDir dir;
  auto throwing = [&] {
    ddp::write_file_atomically(dir / "a.txt", [](const ddp::Append& append) {
      append("x", 1);
      throw std::runtime_error("boom");
    });
  };
  CHECK(message_of<std::runtime_error>(throwing) == "boom");
  CHECK(names(dir.path()).empty());
}

TEST_CASE("a link is made, moved, and survives a failure") {
  TempDir dir;
  ddp::swap_symlink(dir / "latest", "one");
  CHECK(fs::read_symlink(dir / "latest") == "one");
  ddp::swap_symlink(dir / "latest", "two");
  CHECK(fs::read_symlink(dir / "latest") == "two");
  for (int k : {1, 2}) {
    FaultyFileSystem faulty;
    faulty.fail_at = k;
    ddp::io::ScopedFileSystem scope(faulty);
    CHECK_THROWS_AS(ddp::swap_symlink(dir / "latest", "three"), ddp::CheckpointError);
    CHECK(fs::read_symlink(dir / "latest") == "two");
    CHECK(names(dir.path()) == std::set<std::string>{"latest"});
  }
}

TEST_CASE("a directory where the link goes is an error") {
  TempDir dir;
  fs::create_directory(dir / "latest");
  CHECK_THAT(message_of<ddp::CheckpointError>([&] { ddp::swap_symlink(dir / "latest", "one"); }),
             ContainsSubstring("latest"));
  CHECK(names(dir.path()) == std::set<std::string>{"latest"});
}

TEST_CASE("directories are made with their parents, a file in the way is named") {
  TempDir dir;
  ddp::make_directories(dir / "a/b/c");
  CHECK(fs::is_directory(dir / "a/b/c"));
  ddp::make_directories(dir / "a/b/c");
  write(dir / "file", "x");
  CHECK_THAT(message_of<ddp::CheckpointError>([&] { ddp::make_directories(dir / "file/sub"); }),
             ContainsSubstring("file"));
}

TEST_CASE("only our own temporaries have their names") {
  using ddp::is_temporary_name;
  CHECK(is_temporary_name("checkpoint_tmp.0123456789abcdef.pt", "checkpoint", ".pt"));
  CHECK(is_temporary_name(".latest.0123456789abcdef", "checkpoint", ".pt"));
  for (const char* foreign : {"checkpoint_tmp.pt", "checkpoint_tmp.0123456789abcde.pt", "checkpoint_latest.pt",
                              "checkpoint_tmp.0123456789ABCDEF.pt", "my_checkpoint_tmp.0123456789abcdef.pt",
                              "checkpoint_tmp.0123456789abcdef.pt2", ".latest.swp", "step_12.tmp"}) {
    CAPTURE(foreign);
    CHECK_FALSE(is_temporary_name(foreign, "checkpoint", ".pt"));
  }
}
