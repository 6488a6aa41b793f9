// Bounds-checked C functions (C11, Annex K), as far as the vendor's host code uses them.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstring>

typedef int errno_t;
#ifndef EOK
#define EOK 0
#endif
#define SECUREC_MEM_MAX_LEN (0x7fffffffUL)
#define SECUREC_STRING_MAX_LEN (0x7fffffffUL)

namespace harness {
constexpr errno_t kOutOfRange = 34;
}

static inline errno_t memcpy_s(void *to, size_t room, const void *from, size_t bytes)
{
    if (to == nullptr || (from == nullptr && bytes > 0) || bytes > room) {
        return harness::kOutOfRange;
    }
    if (bytes > 0) {
        memcpy(to, from, bytes);
    }
    return EOK;
}

static inline errno_t memmove_s(void *to, size_t room, const void *from, size_t bytes)
{
    if (to == nullptr || bytes > room) {
        return harness::kOutOfRange;
    }
    memmove(to, from, bytes);
    return EOK;
}

static inline errno_t memset_s(void *to, size_t room, int value, size_t bytes)
{
    if (to == nullptr || bytes > room) {
        return harness::kOutOfRange;
    }
    memset(to, value, bytes);
    return EOK;
}

static inline errno_t strncpy_s(char *to, size_t room, const char *from, size_t most)
{
    const size_t length = strnlen(from, most);
    if (length + 1 > room) {
        return harness::kOutOfRange;
    }
    memcpy(to, from, length);
    to[length] = 0;
    return EOK;
}

static inline errno_t strcpy_s(char *to, size_t room, const char *from)
{
    return strncpy_s(to, room, from, strlen(from));
}

static inline errno_t strcat_s(char *to, size_t room, const char *from)
{
    const size_t length = strlen(to);
    return strcpy_s(to + length, room - length, from);
}

static inline int vsprintf_s(char *to, size_t room, const char *format, va_list arguments)
{
    const int length = vsnprintf(to, room, format, arguments);
    return length >= 0 && static_cast<size_t>(length) < room ? length : -1;
}

static inline int vsnprintf_s(char *to, size_t room, size_t, const char *format, va_list arguments)
{
    return vsprintf_s(to, room, format, arguments);
}

static inline int snprintf_s(char *to, size_t room, size_t, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const int length = vsprintf_s(to, room, format, arguments);
    va_end(arguments);
    return length;
}

static inline int sprintf_s(char *to, size_t room, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const int length = vsprintf_s(to, room, format, arguments);
    va_end(arguments);
    return length;
}

static inline char *strtok_s(char *text, const char *delimiters, char **context)
{
    return strtok_r(text, delimiters, context);
}
