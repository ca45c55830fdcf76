// How ranks find each other: a TCP store, and an agreement in it that survives keys of an earlier life.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

#include "ddp/env.h"

namespace ddp::detail {

/// Connects to the store at env.master_addr:master_port; rank 0 serves it unless a torchrun agent does. Throws
/// ConfigError (port taken, host unknown) or TimeoutError (nobody answers), naming host and port.
c10::intrusive_ptr<c10d::Store> connect_store(const Env& env, std::chrono::milliseconds timeout);

/// Returns when all ranks of `place` are there, with a name for this meeting that no other has. `traits` must be equal
/// on all ranks ("cpu gloo"). Throws TimeoutError "joined k of W" with the missing ranks, MismatchError when ranks
/// disagree on the world size or on `traits`.
///
/// After a restart the store may hold the keys of the dead: each rank therefore publishes a fresh nonce, accepts only
/// an answer of rank 0 that contains it, and rank 0 goes on only when every rank has acknowledged the same answer.
std::string meet(c10d::Store& store, const Place& place, const std::string& traits, std::chrono::milliseconds timeout);

/// "" while `store` answers; else ": the store at HOST:PORT is lost, ..." with the remedy, to end a message with.
std::string lost_store(c10d::Store& store);

}  // namespace ddp::detail
