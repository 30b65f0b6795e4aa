// Small matrix products without the dispatcher: the BLAS that ATen calls, called as ATen calls it.
//
// To ATen a product of floating-point matrices is a copy of the bias to the result, and a call of gemm that adds to it.
// Around them are trips through the dispatcher and an iterator, which take longer than to multiply small matrices.

#pragma once

#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstring>
#include <limits>
#include <random>
#include <type_traits>

#include "steps.h"

namespace fxwrap {

// Takes integers by address, of 32 or 64 bits: the processors that have it here are little-endian.
template <typename T>
using Gemm = void (*)(const char* first_how, const char* second_how, const int64_t* m, const int64_t* n,
                      const int64_t* k, const T* alpha, const T* first, const int64_t* first_step, const T* second,
                      const int64_t* second_step, const T* beta, T* result, const int64_t* result_step);

// Whether ATen may compute products of float32 with fewer bits: what it asks itself, where torch has this question.
template <typename Context = at::Context>
bool may_have_fewer_bits() {
  auto reduced = []<typename Precision, typename Backend, typename Operation>(
                     Precision (Context::*precision)(Backend, Operation) const) requires std::is_enum_v<Precision> {
    const auto now = (at::globalContext().*precision)(Backend::MKLDNN, Operation::MATMUL);
    return now == Precision::TF32 || now == Precision::BF16;
  };
  if constexpr (requires { reduced(&Context::float32Precision); })
    return reduced(&Context::float32Precision);
  else
    return true;
}

// A matrix over memory: its strides, in elements.
struct Matrix {
  int64_t rows, columns, down, across;

  Matrix transposed() const { return {columns, rows, across, down}; }
  bool has_whole_columns() const { return down == 1 && across >= rows; }
  int64_t span() const { return (rows - 1) * down + (columns - 1) * across + 1; }
};

// What gemm is given, besides addresses and factors. It has whole columns: ATen may compute the transposed product.
struct Product {
  // Larger ones take so long that the dispatcher does not count. (And ATen copies more elements with several threads.)
  static constexpr int64_t kMostWork = 1 << 18, kMostElements = at::internal::GRAIN_SIZE - 1, kMostMemory = 1 << 20;

  Matrix bias, result;  // of one size
  int64_t k = 0, first_step = 0, second_step = 0, result_step = 0;
  char first_how = 'n', second_how = 'n';  // 't': its rows are whole
  bool swapped = false;                    // the first is the second operand, transposed

  // None where ATen raises or copies operands, or takes long.
  static std::optional<Product> of(const Matrix& bias, Matrix first, Matrix second, const Matrix& result) {
    const auto elements = result.rows * result.columns, k = first.columns;
    if (second.rows != k || first.rows != result.rows || second.columns != result.columns) return {};
    if (std::min(elements, k) < 1 || elements > kMostElements || k > kMostWork / elements) return {};
    for (const auto& one : {bias, first, second, result})
      if (std::max(one.down, one.across) > kMostMemory || one.span() > kMostMemory) return {};
    Product product{bias, result};
    auto& into = product.result;
    auto is_written = [&] { return into.down == 1 && (into.columns == 1 || into.has_whole_columns()); };
    if (!is_written()) {
      product.swapped = true;
      std::swap(first, second);
      for (auto* one : {&product.bias, &first, &second, &into}) *one = one->transposed();
      if (!is_written()) return {};
    }
    product.k = k;
    product.result_step = into.columns == 1 ? into.rows : into.across;
    if (!is_read(first, product.first_how, product.first_step)) return {};
    if (!is_read(second, product.second_how, product.second_step)) return {};
    return product;
  }

  template <typename T>
  void compute(Gemm<T> gemm, const T* from, const T* first, const T* second, T* into, T alpha, T beta) const {
    const auto bytes = static_cast<size_t>(result.rows) * sizeof(T);
    for (int64_t column = 0; from != nullptr && column < result.columns; ++column) {
      auto* to = into + column * result.across;
      const auto* source = from + column * bias.across;
      if (bias.down == 1) std::memcpy(to, source, bytes);
      for (int64_t row = 0; bias.down != 1 && row < result.rows; ++row) to[row] = source[row * bias.down];
    }
    if (swapped) std::swap(first, second);
    gemm(&first_how, &second_how, &result.rows, &result.columns, &k, &alpha, first, &first_step, second, &second_step,
         &beta, into, &result_step);
  }

 private:
  static bool is_read(const Matrix& matrix, char& how, int64_t& step) {
    const bool whole = matrix.has_whole_columns();
    const auto stored = whole ? matrix : matrix.transposed();
    how = whole ? 'n' : 't';
    step = stored.columns == 1 ? stored.rows : stored.across;
    return stored.has_whole_columns();
  }
};

// Addresses: gemm for float and for double, and MKL's function that sets the calling thread's number of threads (null
// if there is none), which returns what it was before.
struct Gemms {
  void *single, *twice;
  int (*threads)(int);

  explicit Gemms(const std::array<uint64_t, 3>& addresses)
      : single(reinterpret_cast<void*>(addresses[0])),
        twice(reinterpret_cast<void*>(addresses[1])),
        threads(reinterpret_cast<int (*)(int)>(addresses[2])) {}
};

// The BLAS has one thread. Products as small as these take less time so than threads take to meet: MKL's two, on two
// virtual cores, 5.7 us for 32 x 32 x 32 (one: 1.3), 10.6 us for 64 x 64 x 64 (one: 6.5).
class OneThread {
 public:
  explicit OneThread(int (*threads)(int)) : threads_(threads), before_(threads ? threads(1) : 0) {}
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;
  ~OneThread() {
    if (threads_) threads_(before_);
  }

 private:
  int (*threads_)(int);
  int before_;
};

// aten::mm.out or aten::addmm.out. The operator runs wherever the BLAS is not known to compute the same bits. Whether
// it does is tried once, in memory of the step's own, for the sizes and strides of the first product.
class ProductStep : public OperatorStep {
 public:
  ProductStep(Results results, const py::object& overload, const Value& args, const Value& kwargs, Gemms gemms)
      : OperatorStep(std::move(results), overload, args, kwargs),
        gemms_(gemms),
        adds_(operator_.schema().name() == "aten::addmm") {
    if (operator_.schema().overload_name() != "out" || (!adds_ && operator_.schema().name() != "aten::mm"))
      throw NotNative();
    const auto arguments = in_order(args, kwargs);
    for (size_t i = 0; i < arguments.size(); ++i) {
      const bool factor = adds_ && (i == 3 || i == 4);
      if (factor) {
        if (!values_[i].isInt() && !values_[i].isDouble()) throw NotNative();  // it is not known
        (i == 3 ? beta_ : alpha_) = values_[i].toScalar();
      } else {
        operands_.push_back({i, Operand(*arguments[i]), {}, {}});
      }
    }
  }
  const char* note() const override { return "BLAS"; }
  Beside beside_others() const override {
    return !tried_ ? Beside::NotKnown : product_ && is_alone() ? Beside::Yes : Beside::No;
  }

  void run(Slots& slots) override {
    if (!directly(slots)) return OperatorStep::run(slots);
    if (!results_.empty() && results_[0]) slots[*results_[0]].set(operands_.back().tensor.in(slots));
  }

 private:
  using Tensors = std::array<const at::Tensor*, 4>;
  struct Argument {
    size_t position;
    Operand tensor;
    std::vector<int64_t> sizes, strides;  // at the first product

    bool is_like(const at::Tensor& other) const {
      return other.sizes().equals(sizes) && other.strides().equals(strides);
    }
    Matrix matrix() const { return {sizes[0], sizes[1], strides[0], strides[1]}; }
  };

  bool directly(Slots& slots) {
    Tensors tensors{};
    c10::DispatchKeySet keys;
    for (size_t i = 0; i < operands_.size(); ++i) {
      tensors[i] = &operands_[i].tensor.in(slots);
      if (!tensors[i]->defined() || tensors[i]->dtype() != tensors[0]->dtype()) return false;
      keys = keys | tensors[i]->key_set();
    }
    // Dense tensors of the CPU without pending bits; no subclass, mode, autocast or autograd wants to see the call.
    const auto here = c10::impl::tls_local_dispatch_key_set();
    keys = (keys | here.included_) - here.excluded_;
    constexpr c10::DispatchKeySet passive({c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::BackendSelect});
    if (keys - passive != c10::DispatchKeySet(c10::DispatchKey::CPU)) return false;
    // Nor does a profiler.
    if (at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value()) return false;
    const auto dtype = tensors[0]->scalar_type();
    if (!(dtype == at::kFloat ? !may_have_fewer_bits() && multiply<float>(tensors)
                              : dtype == at::kDouble && multiply<double>(tensors)))
      return false;
    auto* result = tensors[operands_.size() - 1]->unsafeGetTensorImpl();
    if (keys.has(c10::DispatchKey::ADInplaceOrView)) result->bump_version();
    return true;
  }

  bool is_alone() const { return alone_ != 0 && alone_ == at::get_num_threads(); }

  template <typename T>
  bool multiply(const Tensors& tensors) {
    if (!std::exchange(tried_, true)) learn<T>(tensors);
    for (size_t i = 0; i < operands_.size(); ++i)
      if (!product_ || !operands_[i].is_like(*tensors[i])) return false;
    return tensors[0]->scalar_type() == dtype_ && compute<T>(tensors, is_alone());
  }

  template <typename T>
  void learn(const Tensors& tensors) {
    dtype_ = tensors[0]->scalar_type();
    for (size_t i = 0; i < operands_.size(); ++i) {
      operands_[i].sizes = tensors[i]->sizes().vec();
      operands_[i].strides = tensors[i]->strides().vec();
      if (operands_[i].sizes.size() != 2 && !(adds_ && i == 0)) return;
    }
    const auto result = operands_.back().matrix();
    auto bias = result;
    if (adds_) {
      const std::array size{result.rows, result.columns};
      if (!at::is_expandable_to(tensors[0]->sizes(), size)) return;
      const auto strides = at::inferExpandGeometry_dimvector(tensors[0]->sizes(), tensors[0]->strides(), size).strides;
      bias = {result.rows, result.columns, strides[0], strides[1]};
    }
    product_ = Product::of(bias, operands_[adds_].matrix(), operands_[adds_ + 1].matrix(), result);
    if (product_ && !has_same_bits<T>()) product_.reset();
  }

  // Multiplies random numbers both ways, at the same addresses; and a third time with one thread of the BLAS.
  template <typename T>
  bool has_same_bits() {
    std::minstd_rand random;
    std::array<std::vector<T>, 4> memory;
    std::array<at::Tensor, 4> made;
    Tensors tensors{};
    auto stack = values_;
    for (size_t i = 0; i < operands_.size(); ++i) {
      const auto& argument = operands_[i];
      memory[i].resize(at::detail::computeStorageNbytes(argument.sizes, argument.strides, 1));
      for (auto& number : memory[i]) number = static_cast<T>(random()) / (1 << 30) - 1;
      made[i] = at::from_blob(memory[i].data(), argument.sizes, argument.strides, at::TensorOptions(dtype_));
      stack[argument.position] = made[i];
      tensors[i] = &made[i];
    }
    auto& result = memory[operands_.size() - 1];
    auto forget = [&] { std::fill(result.begin(), result.end(), std::numeric_limits<T>::quiet_NaN()); };
    forget();
    operator_.callBoxed(&stack);
    const auto expected = result;
    auto is_same = [&](bool alone) {
      forget();
      return compute<T>(tensors, alone) && std::memcmp(result.data(), expected.data(), result.size() * sizeof(T)) == 0;
    };
    if (!is_same(false)) return false;
    const auto threads = at::get_num_threads();
    alone_ = threads > 1 && gemms_.threads != nullptr && is_same(true) ? threads : 0;
    return true;
  }

  // False where the bias overlaps the result.
  template <typename T>
  bool compute(const Tensors& tensors, bool alone) const {
    auto in = [&](size_t operand) { return static_cast<const T*>(tensors[operand]->const_data_ptr()); };
    auto* into = static_cast<T*>(tensors[operands_.size() - 1]->mutable_data_ptr());
    const auto* bias = adds_ && beta_.toDouble() != 0 ? in(0) : nullptr;
    if (bias && bias < into + product_->result.span() && into < bias + product_->bias.span()) return false;
    const auto gemm = reinterpret_cast<Gemm<T>>(std::is_same_v<T, float> ? gemms_.single : gemms_.twice);
    const OneThread one(alone ? gemms_.threads : nullptr);
    product_->compute<T>(gemm, bias, in(adds_), in(adds_ + 1), into, alpha_.to<T>(), beta_.to<T>());
    return true;
  }

  Gemms gemms_;
  bool adds_, tried_ = false;
  int alone_ = 0;  // with so many threads the operator computes the bits that one thread does; 0: it does not
  at::Scalar alpha_ = 1, beta_ = 0;
  at::ScalarType dtype_ = at::kFloat;
  std::vector<Argument> operands_;  // the bias if there is one, first, second, result
  std::optional<Product> product_;  // that has been tried
};

}  // namespace fxwrap
