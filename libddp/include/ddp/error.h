// What libddp throws. A message says who, where, what was expected, what was found and what to do:
//
//   [ddp::ProcessGroup] rank 0/2: waited 3 s for all ranks to join, 1 of 2 joined, missing: 1; ...
//
//   try { train(); } catch (const ddp::PeerError& e) { ... }     // another rank died
#pragma once

#include <stdexcept>
#include <string>

namespace ddp {

/// Base of every exception of this library.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An environment variable, an option or an argument cannot be used as it is.
class ConfigError : public Error {
 public:
  using Error::Error;
};

/// Communication failed; the group cannot be used any more.
class CommError : public Error {
 public:
  using Error::Error;
};

/// A wait took longer than the group's timeout.
class TimeoutError : public CommError {
 public:
  using CommError::CommError;
};

/// Another rank closed its connection or ended.
class PeerError : public CommError {
 public:
  using CommError::CommError;
};

/// Ranks disagree, or a tensor does not fit the collective it is given to.
class MismatchError : public CommError {
 public:
  using CommError::CommError;
};

/// A checkpoint cannot be written, found or read.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

/// Input data cannot be used.
class DataError : public Error {
 public:
  using Error::Error;
};

}  // namespace ddp
