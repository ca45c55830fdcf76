#include "rows.h"

namespace qwen::fused {

// Of rows_plain.cpp and so on.
RowSet rows_plain();
#ifdef QWEN_ROWS_X86
RowSet rows_avx2();
RowSet rows_avx512();
#endif

namespace {

std::vector<RowSet> find_row_sets() {
  std::vector<RowSet> sets;
#ifdef QWEN_ROWS_X86
  // These ask the operating system too, which has to save the registers.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && avx2) sets.push_back(rows_avx512());
  if (avx2) sets.push_back(rows_avx2());
#endif
  sets.push_back(rows_plain());
  return sets;
}

}  // namespace

const std::vector<RowSet>& row_sets() {
  static const std::vector<RowSet> sets = find_row_sets();
  return sets;
}

template <>
const RowKernels<float>& rows<float>() {
  static const auto& kernels = *row_sets().front().wide;
  return kernels;
}

template <>
const RowKernels<Bits16>& rows<Bits16>() {
  static const auto& kernels = *row_sets().front().narrow;
  return kernels;
}

}  // namespace qwen::fused
