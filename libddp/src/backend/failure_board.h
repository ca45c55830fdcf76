// Where ranks that fail say why, in the store of their group, so that ranks of other hosts learn the cause: a socket only
// tells them that it was closed.
//
//   board.post("rank 3 (process 77) has ended");
//   board.others();                                // "; rank 2: a peer closed its connection; no word from rank 3"
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "ddp/place.h"

namespace ddp::detail {

/// Of one rank. Not thread-safe. Nothing here throws, and nothing waits longer than it says: the store may be gone, or
/// behind a link that is cut.
class FailureBoard {
 public:
  FailureBoard(c10::intrusive_ptr<c10d::Store> store, Place place);

  /// What the first rank that failed has said, "" while none has. Waits for the store up to a second.
  std::string first();
  /// Says why this rank fails.
  void post(const std::string& reason);
  /// What the others say within `patience`, to be put behind a message: "; rank 2: ...; no word from rank 3".
  std::string others(std::chrono::milliseconds patience);

 private:
  std::optional<std::string> ask(std::chrono::milliseconds limit,
                                 std::function<std::string(c10d::Store& store)> question);

  const c10::intrusive_ptr<c10d::Store> store_;
  const Place place_;
  bool lost_ = false;  // the store did not answer
};

}  // namespace ddp::detail
