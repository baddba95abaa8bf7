// An operation's arguments in two further forms: as tensors of the host, for the stream, and as
// tensors without data, which tell what the results will look like. Tensors that are on the host
// are refused, but for numbers and indices where CUDA takes them.
#pragma once

#include <ATen/core/stack.h>
#include <torch/library.h>

#include <set>
#include <unordered_map>
#include <vector>

#include "tensors.h"

namespace simulated {

using c10::IValue;
using torch::jit::Stack;

inline const std::set<std::string> TAKE_NUMBERS = {
    "_index_put_impl", "add", "atan2", "clamp", "clamp_max", "clamp_min", "copysign", "div", "eq",
    "fill", "floor_divide", "fmod", "ge", "gt", "index_put", "le", "lerp", "lt", "masked_fill",
    "maximum", "minimum", "mul", "ne", "pow", "remainder", "rsub", "sub", "where",
};
inline const std::set<std::string> TAKE_INDICES = {"index", "index_put", "_index_put_impl"};

// An operation's name without its namespace; bare: without the mark of writing in place, too.
inline std::string name_of(const c10::OperatorHandle& operation, bool is_bare) {
    std::string name = operation.schema().name();
    name = name.substr(name.find("::") + 2);
    if (is_bare && name.back() == '_') name.pop_back();
    return name;
}

class Arguments {
public:
    Stack given, on_host, without_data;
    int device = -1;
    bool has_host_indices = false;

    Arguments(const c10::OperatorHandle& operation, const Stack& stack)
        : name(name_of(operation, true)) {
        const auto& declared = operation.schema().arguments();
        given.assign(stack.end() - declared.size(), stack.end());
        c10::AutoGradMode gradients(false);
        at::AutoDispatchBelowADInplaceOrView below;
        for (size_t place = 0; place < declared.size(); place++) {
            const auto* alias = declared[place].alias_info();
            add(given[place], alias && alias->isWrite());
        }
        if (device < 0) device = current_device;  // what makes tensors has none among these
    }

private:
    struct Forms {
        Tensor on_host, without_data;
    };

    std::string name;
    std::unordered_map<at::TensorImpl*, Forms> seen;  // one that comes twice is one

    void add(const IValue& value, bool is_written) {
        if (value.isTensor()) {
            Forms forms = forms_of(value.toTensor(), is_written);
            put(forms.on_host, forms.without_data);
        } else if (value.isTensorList()) {
            c10::List<Tensor> host, bare;
            for (const Tensor& tensor : value.toTensorVector()) {
                Forms forms = forms_of(tensor, is_written);
                host.push_back(forms.on_host);
                bare.push_back(forms.without_data);
            }
            put(host, bare);
        } else if (value.isOptionalTensorList()) {
            c10::List<std::optional<Tensor>> host, bare;
            for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
                bool is_there = tensor && tensor->defined();
                Forms forms = is_there ? forms_of(*tensor, is_written) : Forms{};
                host.push_back(is_there ? std::optional(forms.on_host) : std::nullopt);
                bare.push_back(is_there ? std::optional(forms.without_data) : std::nullopt);
            }
            put(host, bare);
        } else if (value.isDevice()) {
            put(at::Device(at::kCPU), at::Device(at::kMeta));
        } else {
            put(value, value);
        }
    }

    void put(IValue host, IValue bare) {
        on_host.push_back(std::move(host));
        without_data.push_back(std::move(bare));
    }

    Forms forms_of(const Tensor& tensor, bool is_written) {
        if (!tensor.defined()) return {tensor, tensor};
        at::TensorImpl* impl = tensor.unsafeGetTensorImpl();
        auto found = seen.find(impl);
        if (found != seen.end()) return found->second;
        Forms forms = tensor.is_cuda() ? of_device(tensor) : of_host(tensor, is_written);
        if (impl->is_wrapped_number()) {
            forms.on_host.unsafeGetTensorImpl()->set_wrapped_number(true);
            forms.without_data.unsafeGetTensorImpl()->set_wrapped_number(true);
        }
        seen[impl] = forms;
        return forms;
    }

    static Tensor bare(const Tensor& tensor) {
        auto options = tensor.options().device(at::kMeta).pinned_memory(false);
        return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    }

    Forms of_device(const Tensor& tensor) {
        TORCH_CHECK(
            device < 0 || device == tensor.get_device(), name, " takes tensors of one device; ",
            "these are on cuda:", device, " and ", tensor.device());
        device = tensor.get_device();
        return {reached(tensor), bare(tensor)};
    }

    Forms of_host(const Tensor& tensor, bool is_written) {
        bool is_number = tensor.dim() == 0 &&
                         (TAKE_NUMBERS.count(name) ||
                          tensor.unsafeGetTensorImpl()->is_wrapped_number());
        bool is_index = TAKE_INDICES.count(name) && tensor.dim() > 0 &&
                        (tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kBool);
        TORCH_CHECK(
            tensor.is_cpu() && (is_number || is_index) && !is_written, name,
            " takes tensors of one device; one of ", tensor.sizes(), " is on ", tensor.device());
        has_host_indices |= is_index;
        Tensor own = tensor.clone();  // the host may change its own before the operation runs
        return {own, is_number ? own : bare(tensor)};
    }
};

}  // namespace simulated
