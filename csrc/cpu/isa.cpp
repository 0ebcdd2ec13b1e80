#include "isa.h"

#include <cstdlib>
#include <stdexcept>

namespace octavo {

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
    bool supported;
};

#ifdef OCTAVO_HAVE_avx512
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}
#endif

// Best first. An entry for another instruction set (AVX512_BF16, AMX, SVE) needs its flags in CMakeLists.txt, its
// lanes in simd.h where they differ, and a line here.
const std::vector<Isa>& isas() {
    static const std::vector<Isa> all = {
#ifdef OCTAVO_HAVE_avx512vnni
        {&avx512vnni::table, has_avx512() && __builtin_cpu_supports("avx512vnni")},
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

const OpTable& find(const std::string& name) {
    std::string names;
    for (const Isa& isa : isas()) {
        if (!isa.supported) continue;
        if (name == isa.table->name) return *isa.table;
        names += (names.empty() ? "" : ", ") + std::string(isa.table->name);
    }
    throw std::invalid_argument("instruction set '" + name +
                                "' is not available here. OCTAVO_CPU_ISA can be: " + names);
}

const OpTable& initial() {
    const char* name = std::getenv("OCTAVO_CPU_ISA");
    return find(name && *name ? name : supported_isas().front());
}

const OpTable*& active() {
    static const OpTable* table = &initial();
    return table;
}

}  // namespace

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    for (const Isa& isa : isas())
        if (isa.supported) names.push_back(isa.table->name);
    return names;
}

void set_isa(const std::string& name) { active() = &find(name); }

const OpTable& active_table() { return *active(); }

}  // namespace octavo
