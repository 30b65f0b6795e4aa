#include "python.h"

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

namespace backend {

namespace {

std::string text_of_current_exception() {
  try {
    throw;
  } catch (python_error& error) {
    pybind11::gil_scoped_acquire gil;
    error.restore();
    return pybind11::error_already_set().what();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

} // namespace

ReleaseGil::ReleaseGil() {
  if (Py_IsInitialized() && PyGILState_Check()) {
    state_ = PyEval_SaveThread();
  }
}

ReleaseGil::~ReleaseGil() {
  if (state_ != nullptr) {
    PyEval_RestoreThread(state_);
  }
}

void check_signals() {
  if (!Py_IsInitialized()) {
    return;
  }
  pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw pybind11::error_already_set();
  }
}

std::string describe_current_exception() {
  const std::string text = text_of_current_exception();
  return text.substr(0, text.find('\n')); // What follows is a traceback or advice for another situation.
}

} // namespace backend
