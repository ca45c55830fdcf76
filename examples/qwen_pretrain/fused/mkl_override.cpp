// MKL asks this function of its own whether the CPU is Intel's, and takes slower kernels where it says no. A program that
// exports another function of the name is asked instead: on AMD EPYC that made float32 products 1.2 times as fast, and
// bfloat16 ones twice. It is an inside of MKL that no documentation mentions and that any version may drop, so it is in
// nothing but example programs, and only with -DLIBDDP_EXAMPLES_MKL_OVERRIDE=ON. On Intel's CPUs it changes nothing.
extern "C" int mkl_serv_intel_cpu_true();
extern "C" __attribute__((visibility("default"))) int mkl_serv_intel_cpu_true() { return 1; }
