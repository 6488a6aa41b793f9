// What the parts of the harness have in common.
#pragma once

#include <cstdint>
#include <string>

namespace harness {
// Notes that a function was called that nothing defines; it returns 0.
void Undefined(const char *symbol);
// The name of a kernel, by its number.
std::string Kernel(uint32_t id);
}  // namespace harness
