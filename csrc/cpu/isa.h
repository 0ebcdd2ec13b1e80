// Which instruction set's kernels run: one table, best first.
#pragma once

#include <string>
#include <vector>

#include "ops.h"

namespace octavo {

// Those that this CPU executes, among them such as it does not announce, and would not gain by.
std::vector<std::string> supported_isas();

// Chooses by name; throws std::invalid_argument where this build or this CPU lacks it.
void set_isa(const std::string& name);

// The table in use: OCTAVO_CPU_ISA where set, else the best that this CPU announces.
const OpTable& active_table();

}  // namespace octavo
