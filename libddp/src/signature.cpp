#include "signature.h"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <string_view>

namespace ddp::detail {
namespace {

thread_local const Intent* current_intent = nullptr;

const char* name_of_op(int op) {
  constexpr const char* kNames[] = {"sum",     "avg",    "product", "min",       "max",
                                    "bit and", "bit or", "bit xor", "scaled sum"};
  return op >= 0 && op < static_cast<int>(std::size(kNames)) ? kNames[op] : "?";
}

// The finalizer of splitmix64: each bit of the result depends on all of the input.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

uint64_t hash_of(const Signature& signature, uint64_t number) {
  uint64_t hash = mix(number + 0x9e3779b97f4a7c15);
  const auto add = [&](uint64_t value) { hash = mix(hash + 0x9e3779b97f4a7c15 + value); };
  for (const char c : std::string_view(signature.operation)) add(static_cast<unsigned char>(c));
  add(static_cast<uint64_t>(signature.count));
  add(static_cast<uint64_t>(static_cast<int64_t>(signature.op)));
  add(static_cast<uint64_t>(static_cast<int64_t>(signature.dtype)));
  add(static_cast<uint64_t>(static_cast<int64_t>(signature.root)));
  add(static_cast<uint64_t>(signature.pass.forwards));
  add(static_cast<uint64_t>(signature.pass.dropped));
  return hash;
}

uint32_t tag_of(const Signature& signature, uint64_t number) {
  return static_cast<uint32_t>((number & 0xfff) << 20 | (hash_of(signature, number) & 0xfffff));
}

std::string describe(const Pass& pass) {
  if (pass == Pass()) return "";
  std::string text = fmt::format("after {} synchronised forward(s)", pass.forwards);
  if (pass.dropped > 0) text += fmt::format(" and {} time(s) dropping gradients that were not averaged", pass.dropped);
  return text;
}

std::string describe(const Signature& signature, uint64_t number) {
  std::string text = fmt::format("#{} {}", number, signature.operation);
  if (signature.op >= 0) text += fmt::format(" {}", name_of_op(signature.op));
  if (signature.dtype >= 0) {
    text += fmt::format(" of {} {}", signature.count, c10::toString(static_cast<c10::ScalarType>(signature.dtype)));
  }
  if (signature.root >= 0) text += fmt::format(" root {}", signature.root);
  const std::string pass = describe(signature.pass);
  return pass.empty() ? text : text + " " + pass;
}

Intent::Intent(const char* operation, const at::Tensor& tensor, int op)
    : operation_(operation),
      count_(tensor.numel()),
      dtype_(static_cast<int16_t>(tensor.scalar_type())),
      op_(static_cast<int16_t>(op)),
      outer_(current_intent) {
  current_intent = this;
}

Intent::~Intent() { current_intent = outer_; }

const Intent* Intent::current() { return current_intent; }

void Intent::describe(Signature& signature) const {
  signature.operation = operation_;
  signature.count = count_;
  signature.dtype = dtype_;
  signature.op = op_;
}

}  // namespace ddp::detail
