#pragma once

#include <Python.h>

#include <string>

namespace backend {

// Lets other threads run Python while this one waits for the device: what it waits for may be Python itself.
class ReleaseGil {
 public:
  ReleaseGil();
  ~ReleaseGil();
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

// Raises what the handler of a signal raises, as for Ctrl-C, if this is the thread that handles signals.
void check_signals();

// The first line of the exception being handled; call it inside of a catch block.
std::string describe_current_exception();

} // namespace backend
