#pragma once

// The only place in C++ that knows what the device is called. The Python side has its own in name.py.
#define DEVICE_NAME "hostsim"
#define DEVICE_REGISTRY_KEY HOSTSIM // the upper-case name, under which torch looks for the graph
#define DEVICE_ENVIRONMENT(variable) "HOSTSIM_" variable
