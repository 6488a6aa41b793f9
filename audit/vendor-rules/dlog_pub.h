// The vendor's log, which its checks write beside the standard output.
#pragma once

#define ASCENDCKERNEL 0
#define dlog_debug(...)
#define dlog_info(...)
#define dlog_warn(...)
#define dlog_error(...)
