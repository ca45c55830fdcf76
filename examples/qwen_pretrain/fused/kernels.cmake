# What the fused kernels of qwen_parts are compiled with: an instruction set for each rows_*.cpp, and the products of
# matrices that libtorch_cpu exports.
include(CheckCXXSourceCompiles)

# --- rows_*.cpp: chosen when the program runs, so the rest of the program must not get these flags -------------------
set(_rows "${CMAKE_CURRENT_SOURCE_DIR}/qwen_pretrain/fused")
# Products and sums in one instruction where there is one. The vectors never cross a file, so their ABI is nobody's.
set(_row_flags -ffp-contract=fast -Wno-psabi)
set(_x86 FALSE)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(_x86 TRUE)
endif()
if(_x86)
  set_source_files_properties("${_rows}/rows.cpp" PROPERTIES COMPILE_DEFINITIONS QWEN_ROWS_X86)
  set_source_files_properties("${_rows}/rows_avx2.cpp" PROPERTIES COMPILE_OPTIONS "${_row_flags};-mavx2;-mfma")
  set_source_files_properties("${_rows}/rows_avx512.cpp" PROPERTIES COMPILE_OPTIONS
    "${_row_flags};-mavx2;-mfma;-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mprefer-vector-width=512")
else()
  set_source_files_properties("${_rows}/rows_avx2.cpp" "${_rows}/rows_avx512.cpp" PROPERTIES HEADER_FILE_ONLY ON)
endif()
set_source_files_properties("${_rows}/rows_plain.cpp" PROPERTIES COMPILE_OPTIONS "${_row_flags}")
set_source_files_properties("${_rows}/rows.cpp" "${_rows}/rows_plain.cpp" "${_rows}/rows_avx2.cpp"
  "${_rows}/rows_avx512.cpp" PROPERTIES SKIP_PRECOMPILE_HEADERS ON)

# --- gemm.cpp: MKL's functions, where libtorch_cpu brings them; otherwise at::mm ---------------------------------------
set(CMAKE_REQUIRED_LIBRARIES libtorch::torch_cpu)
set(CMAKE_REQUIRED_LINK_OPTIONS -Wl,--allow-shlib-undefined)
check_cxx_source_compiles("extern \"C\" void sgemm_(); int main() { sgemm_(); }" LIBDDP_EXAMPLES_HAS_SGEMM)
check_cxx_source_compiles("extern \"C\" void cblas_gemm_bf16bf16f32(); int main() { cblas_gemm_bf16bf16f32(); }"
  LIBDDP_EXAMPLES_HAS_BF16_GEMM)
unset(CMAKE_REQUIRED_LIBRARIES)
unset(CMAKE_REQUIRED_LINK_OPTIONS)
set(_gemm "")
if(LIBDDP_EXAMPLES_HAS_SGEMM)
  list(APPEND _gemm QWEN_HAS_SGEMM)
endif()
if(LIBDDP_EXAMPLES_HAS_BF16_GEMM)
  list(APPEND _gemm QWEN_HAS_BF16_GEMM)
endif()
set_source_files_properties("${_rows}/gemm.cpp" PROPERTIES COMPILE_DEFINITIONS "${_gemm}")
