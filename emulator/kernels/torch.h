// What all kernels include of torch. It is compiled once, in advance: reading it takes longer than any kernel.
#include <ATen/ATen.h>
#include <ATen/MetaFunctions.h>
