#include "isa.h"

#include <algorithm>
#include <chrono>
#include <csetjmp>
#include <csignal>
#include <cstdlib>
#include <stdexcept>

namespace octavo {

namespace avx512bf16 {
void linear(const LinearArgs&) noexcept;
}
namespace avx512vnni {
extern const OpTable table;
}
namespace avx512 {
extern const OpTable table;
}
namespace avx2 {
extern const OpTable table;
}
namespace neon {
extern const OpTable table;
}
namespace scalar {
extern const OpTable table;
}

namespace {

struct Isa {
    const OpTable* table;
    bool may_be_chosen;            // without being named: the CPU announces it, and it is not slower than the next
    bool (*executes)() = nullptr;  // tries it, where the CPU's announcement says too little
};

#ifdef OCTAVO_HAVE_avx512
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}
bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
#endif

#ifdef OCTAVO_HAVE_avx512bf16
// Only products of bf16 differ from VNNI's.
const OpTable& bf16_table() {
    static const OpTable table = [] {
        OpTable vnni = avx512vnni::table;
        vnni.name = "avx512bf16";
        vnni.linear = avx512bf16::linear;
        return vnni;
    }();
    return table;
}

sigjmp_buf after_bf16;

// Hypervisors hide AVX512_BF16 from guests that may move to a CPU without it. It needs no state of its own, so it
// executes nevertheless, and may be chosen by name. It must round as two multiply-adds do, the second numbers' first:
// 1 + 1.5 · 2^-24, then + 2^-24, both upwards. Any other way of adding gives 1 + 2^-23.
bool executes_bf16() {
    static const bool result = [] {
        if (!has_vnni()) return false;
        struct sigaction action = {}, before = {};
        action.sa_handler = [](int) { siglongjmp(after_bf16, 1); };
        sigaction(SIGILL, &action, &before);
        volatile float rounded = 0.0f;  // keeps its value when the handler returns here
        if (sigsetjmp(after_bf16, 1) == 0) {
            const uint32_t pairs[] = {0x3fc03f80, 0x33803380};  // (1, 1.5) and twice 2^-24, the first in the low half
            float sum = 1.0f;
            asm volatile(
                "vmovss %1, %%xmm14\n vmovss %2, %%xmm15\n vdpbf16ps %%xmm14, %%xmm15, %0"
                : "+x"(sum)
                : "m"(pairs[0]), "m"(pairs[1])
                : "xmm14", "xmm15");
            rounded = sum;
        }
        sigaction(SIGILL, &before, nullptr);
        return rounded == 1.0f + 0x1p-22f;
    }();
    return result;
}

// The instruction 7168 times, in enough chains to fill the pipes.
#define OCTAVO_CHAINS(instruction)                                                                                    \
    asm volatile(".irp r, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15; vxorps %%xmm\\r, %%xmm\\r, %%xmm\\r; .endr\n"         \
                 "mov $512, %%ecx\n"                                                                                  \
                 "1: .irp r, 0,1,2,3,4,5,6,7,8,9,10,11,12,13; " instruction " %%zmm14, %%zmm15, %%zmm\\r; .endr\n"   \
                 "dec %%ecx; jnz 1b; vzeroupper" ::                                                                   \
                     : "ecx", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",   \
                       "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15")

template <class Fn>
double least_seconds(const Fn& fn) {
    double least = 1.0;
    for (int i = 0; i < 8; ++i) {
        const auto start = std::chrono::steady_clock::now();
        fn();
        least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return least;
}

// A dot product does the work of two multiply-adds and spares the unpacking of their operands. Some CPUs take as long
// for it as for one multiply-add; others (Intel's, which have AMX for such work) take four times as long. The bits are
// the same, so results do not depend on what is measured here.
bool bf16_is_fast() {
    const double dots = least_seconds([] { OCTAVO_CHAINS("vdpbf16ps"); });
    return dots < 2.0 * least_seconds([] { OCTAVO_CHAINS("vfmadd231ps"); });
}
#endif

// Best first. An entry for another instruction set (AMX, SVE) needs its flags in CMakeLists.txt, its lanes in simd.h
// where they differ, and a line here.
const std::vector<Isa>& isas() {
    static const std::vector<Isa> all = {
#ifdef OCTAVO_HAVE_avx512bf16
        {&bf16_table(), has_vnni() && __builtin_cpu_supports("avx512bf16") && executes_bf16() && bf16_is_fast(),
         executes_bf16},
#endif
#ifdef OCTAVO_HAVE_avx512vnni
        {&avx512vnni::table, has_vnni()},
#endif
#ifdef OCTAVO_HAVE_avx512
        {&avx512::table, has_avx512()},
#endif
#ifdef OCTAVO_HAVE_avx2
        {&avx2::table,
         __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")},
#endif
#ifdef OCTAVO_HAVE_neon
        {&neon::table, true},
#endif
        {&scalar::table, true},
    };
    return all;
}

bool is_supported(const Isa& isa) { return isa.may_be_chosen || (isa.executes && isa.executes()); }

const OpTable& find(const std::string& name) {
    for (const Isa& isa : isas())
        if (name == isa.table->name && is_supported(isa)) return *isa.table;
    std::string names;
    for (const std::string& supported : supported_isas()) names += (names.empty() ? "" : ", ") + supported;
    throw std::invalid_argument("instruction set '" + name +
                                "' is not available here. OCTAVO_CPU_ISA can be: " + names);
}

const OpTable& initial() {
    const char* name = std::getenv("OCTAVO_CPU_ISA");
    if (name && *name) return find(name);
    for (const Isa& isa : isas())
        if (isa.may_be_chosen) return *isa.table;
    return scalar::table;
}

const OpTable*& active() {
    static const OpTable* table = &initial();
    return table;
}

}  // namespace

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    for (const Isa& isa : isas())
        if (is_supported(isa)) names.push_back(isa.table->name);
    return names;
}

void set_isa(const std::string& name) { active() = &find(name); }

const OpTable& active_table() { return *active(); }

}  // namespace octavo
