// One instruction set's functions: the kernels of ops.h's list, and its ceilings.
#include "simd.h"

namespace octavo::OCTAVO_ISA {

#define OCTAVO_NAME_(name) #name
#define OCTAVO_NAME(name) OCTAVO_NAME_(name)

#define OCTAVO_DECLARE(name, Args) void name(const Args&) noexcept;
OCTAVO_KERNELS(OCTAVO_DECLARE)
void fma_loop(int64_t num_units, float* sink) noexcept;
void read_loop(const ReadSpan* spans, int64_t num_spans, float* sink) noexcept;

extern const OpTable table;
#define OCTAVO_ENTRY(name, Args) .name = name,
const OpTable table = {
    .name = OCTAVO_NAME(OCTAVO_ISA),
    OCTAVO_KERNELS(OCTAVO_ENTRY)
    .fma_loop = fma_loop,
    .read_loop = read_loop,
};

}  // namespace octavo::OCTAVO_ISA
