// Names nothing of libtorch_cuda, and is still linked with it.
#include <c10/cuda/CUDAFunctions.h>
#include <ddp/version.h>

#include <iostream>

int main() { std::cout << "libddp " << ddp::version() << ": " << int(c10::cuda::device_count()) << " devices\n"; }
