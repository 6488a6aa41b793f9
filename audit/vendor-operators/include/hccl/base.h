// The types of the communication library that headers name.
#pragma once

typedef void *HcclComm;
typedef int HcclResult;
