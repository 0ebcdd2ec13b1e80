// Which instruction set's kernels run: one table, best first.
#pragma once

#include <string>
#include <vector>

#include "ops.h"

namespace octavo {

// The instruction sets that this CPU executes. Some of them it does not announce, or would not gain by.
std::vector<std::string> supported_isas();

// Chooses by name; throws std::invalid_argument where this build or this CPU lacks it.
void set_isa(const std::string& name);

// The table in use: OCTAVO_CPU_ISA where set, else the best that this CPU announces.
const OpTable& active_table();

}  // namespace octavo
