// A disk in memory that keeps only what was synced, for power losses after each operation.
//
//   LosingFileSystem disk;
//   disk.power_fails_after = 7;                                  // the seventh change is the last
//   { ddp::io::ScopedFileSystem scope(disk); save(); }           // fails from there on
//   disk.write_image(random, dir);                               // one of the states that the disk may be in
//
// What POSIX promises, and no more: what a file holds is durable by its fsync, names by the fsync of their directory.
// Until then each write may be there, be missing or be torn, whatever became of those before it, and each change of a
// name (one rename is one change) may be there or not.
#pragma once

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "io/file_system.h"

namespace ddp::test {

/// One directory, which exists, whatever its path.
class LosingFileSystem final : public io::FileSystem {
 public:
  int power_fails_after = -1;  ///< the number of changes that happen; -1: it does not fail
  int changes() const { return changes_; }

  enum class Loss { kAll, kNothing, kInOrder, kAnything };
  /// Writes a state that the disk may be in now into `to`, an empty folder of the real file system.
  void write_image(Loss loss, std::mt19937& random, const std::filesystem::path& to) const {
    auto coin = [&] { return loss == Loss::kNothing || (loss == Loss::kAnything && random() % 2 == 0); };
    auto names = durable_names_;
    // In order: the first few changes of names and, of each file, the first few writes.
    auto keep_first = [&](size_t count) { return loss == Loss::kInOrder ? random() % (count + 1) : count; };
    size_t left = keep_first(unsynced_names_.size());
    for (const Change& change : unsynced_names_) {
      if (loss == Loss::kInOrder ? left == 0 : !coin()) continue;
      if (loss == Loss::kInOrder) --left;
      for (const auto& [name, node] : change) apply(names, name, node);
    }
    for (const auto& [name, number] : names) {
      const Node& node = nodes_[number];
      if (node.kind == io::Kind::kLink) {
        std::filesystem::create_symlink(node.target, to / name);
        continue;
      }
      std::string content = node.synced;
      size_t writes = keep_first(node.unsynced.size());
      for (const Write& write : node.unsynced) {
        std::string data = write.data;
        if (loss == Loss::kInOrder) {
          if (writes == 0) break;
          if (--writes == 0) data.resize(random() % (data.size() + 1));
        } else if (!coin()) {
          continue;
        } else if (loss == Loss::kAnything && random() % 8 == 0) {
          data.resize(random() % (data.size() + 1));
        }
        if (content.size() < write.offset + data.size()) content.resize(write.offset + data.size());
        content.replace(write.offset, data.size(), data);
      }
      std::ofstream(to / name, std::ios::binary) << content;
    }
  }

  int create(const std::string& path) override {
    const std::string name = name_of(path);
    if (names_.contains(name)) return -EEXIST;
    if (!change()) return -EIO;
    nodes_.push_back({.kind = io::Kind::kFile});
    rename_nodes({{name, nodes_.size() - 1}});
    return open_node(nodes_.size() - 1);
  }
  int open(const std::string& path, bool) override {
    if (off_) return -EIO;
    const auto found = names_.find(name_of(path));
    return found == names_.end() ? -ENOENT : open_node(found->second);
  }
  int64_t write(int descriptor, const void* data, size_t size) override {
    if (!change()) return -EIO;
    Node& node = nodes_[open_.at(descriptor)];
    node.unsynced.push_back({.offset = node.content.size(), .data = {static_cast<const char*>(data), size}});
    node.content.append(static_cast<const char*>(data), size);
    return static_cast<int64_t>(size);
  }
  void start_writeback(int, uint64_t, uint64_t) override {}
  int64_t read(int descriptor, void* data, size_t size, uint64_t offset) override {
    if (off_) return -EIO;
    const std::string& content = nodes_[open_.at(descriptor)].content;
    if (offset >= content.size()) return 0;
    return static_cast<int64_t>(content.copy(static_cast<char*>(data), size, offset));
  }
  int64_t size(int descriptor) override { return static_cast<int64_t>(nodes_[open_.at(descriptor)].content.size()); }
  int sync(int descriptor) override {
    if (!change()) return -EIO;
    Node& node = nodes_[open_.at(descriptor)];
    node.synced = node.content;
    node.unsynced.clear();
    return 0;
  }
  int close(int descriptor) override { return open_.erase(descriptor) == 1 ? 0 : -EBADF; }

  int rename(const std::string& from, const std::string& to) override {
    const auto found = names_.find(name_of(from));
    if (found == names_.end()) return -ENOENT;
    if (!change()) return -EIO;
    rename_nodes({{name_of(to), found->second}, {name_of(from), std::nullopt}});
    return 0;
  }
  int symlink(const std::string& target, const std::string& link) override {
    if (names_.contains(name_of(link))) return -EEXIST;
    if (!change()) return -EIO;
    nodes_.push_back({.kind = io::Kind::kLink, .target = target});
    rename_nodes({{name_of(link), nodes_.size() - 1}});
    return 0;
  }
  int read_link(const std::string& link, std::string& target) override {
    const auto found = names_.find(name_of(link));
    if (off_ || found == names_.end()) return off_ ? -EIO : -ENOENT;
    if (nodes_[found->second].kind != io::Kind::kLink) return -EINVAL;
    target = nodes_[found->second].target;
    return 0;
  }
  int remove(const std::string& path) override {
    if (!names_.contains(name_of(path))) return -ENOENT;
    if (!change()) return -EIO;
    rename_nodes({{name_of(path), std::nullopt}});
    return 0;
  }
  int make_directory(const std::string&) override { return -EEXIST; }
  int sync_directory(const std::string&) override {
    if (!change()) return -EIO;
    durable_names_ = names_;
    unsynced_names_.clear();
    return 0;
  }
  int list(const std::string&, std::vector<std::string>& names) override {
    if (off_) return -EIO;
    names.clear();
    for (const auto& [name, node] : names_) names.push_back(name);
    return 0;
  }
  int kind(const std::string& path, io::Kind& kind) override {
    if (off_) return -EIO;
    const auto found = names_.find(name_of(path));
    kind = found == names_.end() ? io::Kind::kMissing : nodes_[found->second].kind;
    return 0;
  }
  int free_space(const std::string&, uint64_t& bytes) override {
    bytes = UINT64_MAX;
    return 0;
  }
  int lock(const std::string&, std::string&) override {
    open_[++last_descriptor_] = 0;
    return last_descriptor_;
  }

 private:
  struct Write {
    size_t offset;
    std::string data;
  };
  struct Node {
    io::Kind kind;
    std::string target = {};
    std::string content = {};  // as this process sees it
    std::string synced = {};   // what is on the disk for certain
    std::vector<Write> unsynced = {};
  };
  using Names = std::map<std::string, size_t>;
  using Change = std::map<std::string, std::optional<size_t>>;

  static std::string name_of(const std::string& path) { return std::filesystem::path(path).filename(); }
  static void apply(Names& names, const std::string& name, const std::optional<size_t>& node) {
    if (node) {
      names[name] = *node;
    } else {
      names.erase(name);
    }
  }
  void rename_nodes(const Change& change) {
    for (const auto& [name, node] : change) apply(names_, name, node);
    unsynced_names_.push_back(change);
  }
  int open_node(size_t node) {
    open_[++last_descriptor_] = node;
    return last_descriptor_;
  }
  // Counts a change; false when the power is off.
  bool change() {
    off_ = off_ || (power_fails_after >= 0 && changes_ >= power_fails_after);
    if (!off_) ++changes_;
    return !off_;
  }

  std::vector<Node> nodes_;
  Names names_, durable_names_;
  std::vector<Change> unsynced_names_;
  std::map<int, size_t> open_;
  int last_descriptor_ = 1 << 20;  // none of the kernel's
  int changes_ = 0;
  bool off_ = false;
};

}  // namespace ddp::test
