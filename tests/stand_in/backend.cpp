// A device that is not the CPU, on a machine that has no other: a stand-in for a GPU.
//
// Its tensors live in host memory, but torch knows them by a device type of their own ("stand_in").
// Every operation is computed by the CPU's kernel on copies. As on a GPU: an operation whose
// tensors are on different devices is refused (numbers, that is tensors without dimensions, and
// indices may come from the host); random numbers come from generators of the device; backward
// passes run in a thread of the device; autocast has a state of its own.
// Not as on a GPU: kernels, their rounding, streams, and speed.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);
const c10::Stream kStream(c10::Stream::DEFAULT, kDevice);

// Memory.

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes == 0 ? nullptr : c10::GetCPUAllocator()->raw_allocate(bytes);
    return {data, data, &release, kDevice};
  }
  static void release(void* data) {
    if (data != nullptr) c10::GetCPUAllocator()->raw_deallocate(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

Memory memory;
REGISTER_ALLOCATOR(kType, &memory);

// One device with one stream: nothing to guard.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return kStream; }
  c10::Stream exchangeStream(c10::Stream) const override { return kStream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Random numbers.

struct Source final : at::CPUGeneratorImpl {
  explicit Source(uint64_t seed = c10::default_rng_seed_val) : CPUGeneratorImpl(seed) {
    device_ = kDevice;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

const at::Generator& default_source() {
  static const at::Generator source = at::make_generator<Source>();
  return source;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_source();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Source>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DataPtr data = memory.allocate(bytes);
    std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};

const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

// Tensors.

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &memory, kKeys, c10::dtype_or_default(dtype));
}

// The same memory, as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& x) {
  if (x.device().type() != kType) return x;
  return at::from_blob(
      x.data_ptr(), x.sizes(), x.strides(), x.options().device(at::kCPU).requires_grad(false));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  on_host(to).copy_(on_host(from));
  return to;
}

at::Scalar local_scalar(const at::Tensor& x) {
  return on_host(x).item();
}

const at::Tensor& resize(
    const at::Tensor& x, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  at::native::resize_impl_cpu_(x.unsafeGetTensorImpl(), size, std::nullopt);
  if (format.has_value()) x.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return x;
}

at::Tensor& set_storage(
    at::Tensor& x, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  x.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  x.unsafeGetTensorImpl()->set_storage_offset(offset);
  x.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return x;
}

at::Tensor alias(const at::Tensor& x) {
  return at::native::as_strided_tensorimpl(x, x.sizes(), x.strides(), x.storage_offset());
}

at::Tensor reshape_alias(const at::Tensor& x, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(x, size, stride, x.storage_offset());
}

// Layers that torch computes in one call: a backend that is not torch's own has to bring them.

at::Tensor to_device(const at::Tensor& x) {
  return x.defined() ? x.to(kDevice) : x;
}

at::Tensor convolution(
    const at::Tensor& x,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups) {
  std::optional<at::Tensor> b;
  if (bias.has_value() && bias->defined()) b = on_host(*bias);
  return to_device(at::convolution(
      on_host(x), on_host(weight), b, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad,
    const at::Tensor& x,
    const at::Tensor& weight,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> wanted) {
  auto [dx, dw, db] = at::convolution_backward(
      on_host(grad), on_host(x), on_host(weight), at::IntArrayRef{grad.size(1)}, stride, padding,
      dilation, transposed, output_padding, groups, wanted);
  return {to_device(dx), to_device(dw), to_device(db)};
}

using Two = std::tuple<at::Tensor, at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Five = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

at::Tensor with_bias(const at::Tensor& x, const std::optional<at::Tensor>& bias) {
  return bias.has_value() && bias->defined() ? x + *bias : x;
}

Three lstm_cell(
    const at::Tensor& ax,
    const at::Tensor& ah,
    const at::Tensor& c,
    const std::optional<at::Tensor>& bx,
    const std::optional<at::Tensor>& bh) {
  const auto a = (with_bias(ax, bx) + with_bias(ah, bh)).chunk(4, 1);
  const auto i = a[0].sigmoid(), f = a[1].sigmoid(), g = a[2].tanh(), o = a[3].sigmoid();
  const auto cell = f * c + i * g;
  return {o * cell.tanh(), cell, at::cat({i, f, g, o}, 1)};
}

Three lstm_cell_backward(
    const std::optional<at::Tensor>& grad_h,
    const std::optional<at::Tensor>& grad_c,
    const at::Tensor& c,
    const at::Tensor& cell,
    const at::Tensor& gates,
    bool has_bias) {
  const auto a = gates.chunk(4, 1);
  const auto& i = a[0]; const auto& f = a[1]; const auto& g = a[2]; const auto& o = a[3];
  const auto t = cell.tanh();
  const auto dh = grad_h.has_value() && grad_h->defined() ? *grad_h : at::zeros_like(cell);
  auto dc = dh * o * (1 - t * t);
  if (grad_c.has_value() && grad_c->defined()) dc = dc + *grad_c;
  const auto grad = at::cat(
      {dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g * g), dh * t * o * (1 - o)}, 1);
  return {grad, dc * f, has_bias ? grad.sum(0) : at::Tensor()};
}

Two gru_cell(
    const at::Tensor& ax,
    const at::Tensor& ah,
    const at::Tensor& h,
    const std::optional<at::Tensor>& bx,
    const std::optional<at::Tensor>& bh) {
  const auto x = with_bias(ax, bx).chunk(3, 1), y = with_bias(ah, bh).chunk(3, 1);
  const auto r = (x[0] + y[0]).sigmoid(), z = (x[1] + y[1]).sigmoid();
  const auto n = (x[2] + r * y[2]).tanh();
  return {n + z * (h - n), at::cat({r, z, n, h, y[2]}, 1)};
}

Five gru_cell_backward(const at::Tensor& grad, const at::Tensor& workspace, bool has_bias) {
  const auto w = workspace.chunk(5, 1);
  const auto& r = w[0]; const auto& z = w[1]; const auto& n = w[2]; const auto& h = w[3];
  const auto dn = grad * (1 - z) * (1 - n * n);
  const auto dz = grad * (h - n) * z * (1 - z), dr = dn * w[4] * r * (1 - r);
  const auto dx = at::cat({dr, dz, dn}, 1), dh = at::cat({dr, dz, dn * r}, 1);
  const auto none = at::Tensor();
  return {dx, dh, grad * z, has_bias ? dx.sum(0) : none, has_bias ? dh.sum(0) : none};
}

// All other operations.

void check_device(const std::string& name, const at::Tensor& x) {
  TORCH_CHECK(
      !x.defined() || x.dim() == 0 || x.device().type() == kType,
      "stand_in: expected all tensors to be on the same device, but ", name, " got one on ",
      x.device());
}

void check_devices(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& name = op.schema().name();
  const bool indices = name == "aten::index" || name == "aten::index_put_" ||
      name == "aten::_index_put_impl_" || name == "aten::_unsafe_index";
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].isTensor()) {
      check_device(name, arguments[i].toTensor());
    } else if (arguments[i].isTensorList()) {
      for (const at::Tensor& x : arguments[i].toTensorList()) check_device(name, x);
    } else if (arguments[i].isOptionalTensorList() && !indices) {
      for (const std::optional<at::Tensor>& x : arguments[i].toOptionalTensorList())
        if (x.has_value()) check_device(name, *x);
    }
  }
}

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_devices(op, *stack);
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  std::optional<at::Generator> drawn_from;
  at::Generator on_cpu;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].type()->str() != "Generator?") continue;
    auto& value = (*stack)[first + i];
    drawn_from = value.isNone() ? default_source() : value.toGenerator();
    TORCH_CHECK(
        drawn_from->device().type() == kType, "Expected a 'stand_in' generator for ",
        op.schema().name(), " but found one for ", drawn_from->device());
    on_cpu = at::detail::createCPUGenerator();
    on_cpu.set_state(drawn_from->get_state());
    value = on_cpu;
  }
  at::native::cpu_fallback(op, stack);
  if (drawn_from.has_value()) drawn_from->set_state(on_cpu.get_state());
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  m.impl("alias", &alias);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("unfold", TORCH_FN(at::native::unfold));
}

// What Python needs of the device's own random numbers.

at::Tensor random_state() {
  return default_source().get_state();
}

void set_random_state(const at::Tensor& state) {
  auto source = default_source();
  source.set_state(state);
}

void seed(int64_t value) {
  auto source = default_source();
  source.set_current_seed(static_cast<uint64_t>(value));
}

TORCH_LIBRARY(stand_in, m) {
  m.def("random_state() -> Tensor", &random_state);
  m.def("set_random_state(Tensor state) -> ()", &set_random_state);
  m.def("seed(int value) -> ()", &seed);
}

// Autocast, by torch's own lists.

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define WIDER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(WIDER)
  AT_FORALL_PROMOTE(WIDEST)
}
