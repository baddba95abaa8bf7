// Every operation that has no function of its own here: the host's runs in the stream's turn.
//
// What the results look like is asked of tensors without data. Where they do not tell (a number is
// returned, or data decide the size) the thread waits and the operation runs at once.
#pragma once

#include "arguments.h"
#include "copies.h"

namespace simulated {

class Call {
public:
    Call(const c10::OperatorHandle& operation, const Stack& stack)
        : operation(operation),
          declared(operation.schema().arguments()),
          returned(operation.schema().returns()),
          arguments(operation, stack),
          stream(current_stream(arguments.device)) {
        for (const auto& each : returned) argument_returned.push_back(which_argument(each));
    }

    Stack run() {
        if (arguments.has_host_indices) tell_of_wait(name() + " with indices of the host");
        Stack forms = arguments.without_data;
        if (know_forms(forms)) return run_later(forms);
        if (data_decide()) tell_of_wait(name());
        return run_now();
    }

private:
    const c10::OperatorHandle& operation;
    const std::vector<c10::Argument>&declared, &returned;
    Arguments arguments;
    int stream;
    std::vector<int> argument_returned;  // for each result: which argument it is; -1: none

    std::string name() const { return name_of(operation, false); }

    static bool is_written(const c10::Argument& argument) {
        return argument.alias_info() && argument.alias_info()->isWrite();
    }

    int which_argument(const c10::Argument& result) const {
        const auto* alias = result.alias_info();
        if (!alias) return -1;
        for (size_t place = 0; alias->isWrite() && place < declared.size(); place++) {
            const auto* other = declared[place].alias_info();
            if (other && other->beforeSets() == alias->beforeSets()) return place;
        }
        TORCH_CHECK(
            false, "the simulated device has no ", operation.schema().operator_name(),
            ", whose result is a view; add it in device.cpp");
    }

    bool returns_tensors() const {
        for (const auto& each : returned) {
            auto kind = each.type()->kind();
            if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return false;
        }
        return true;
    }

    bool data_decide() const {
        std::string bare = name_of(operation, true);
        return !returns_tensors() || bare == "nonzero" || bare == "masked_select" ||
               bare == "index" || bare.find("unique") != std::string::npos;
    }

    // Lets the operation run on arguments without data; false if that does not tell the results.
    bool know_forms(Stack& forms) const {
        if (!returns_tensors()) return false;
        c10::AutoGradMode gradients(false);
        at::AutoDispatchBelowADInplaceOrView below;
        try {
            operation.callBoxed(&forms);
        } catch (std::exception&) {
            return false;  // it has no such form, or is wrong: then it fails on the host, too
        }
        for (const IValue& form : forms) {
            bool is_tensor = form.isTensor() && form.toTensor().defined();
            if (is_tensor && !form.toTensor().is_meta()) return false;
        }
        return true;
    }

    Tensor new_like(const Tensor& form) const {
        if (!form.defined()) return form;
        return new_strided_tensor(
            form.sizes(), form.strides(), form.scalar_type(), arguments.device);
    }

    // What is written to and has another size now, as `out=` may: larger memory, if it has to be.
    void resize_written() {
        for (size_t place = 0; place < declared.size(); place++) {
            const IValue& value = arguments.given[place];
            if (!is_written(declared[place]) || !value.isTensor()) continue;
            const Tensor& tensor = value.toTensor();
            if (!tensor.defined()) continue;
            const Tensor& form = arguments.without_data[place].toTensor();
            if (tensor.sizes() == form.sizes()) continue;
            resize_tensor(tensor, form.sizes(), std::nullopt);
            arguments.on_host[place] = reached(tensor);
        }
    }

    // Where the host's operation is to write by itself: it would resize what it is given.
    std::vector<size_t> places_of_out() const {
        std::vector<size_t> places;
        for (size_t place = 0; place < declared.size(); place++) {
            const IValue& value = arguments.on_host[place];
            bool is_tensor = value.isTensor() && value.toTensor().defined();
            if (declared[place].kwarg_only() && is_written(declared[place]) && is_tensor) {
                places.push_back(place);
            }
        }
        return places;
    }

    struct Target {
        size_t result, item;  // which of the results, and of those in it
        Tensor tensor;        // what it is copied to
    };

    static std::vector<Tensor> tensors_of(const IValue& value) {
        return value.isTensor() ? std::vector<Tensor>{value.toTensor()} : value.toTensorVector();
    }

    Stack run_later(const Stack& forms) {
        resize_written();
        Stack results;
        std::vector<Target> targets;
        for (size_t result = 0; result < returned.size(); result++) {
            if (argument_returned[result] >= 0) {
                results.push_back(arguments.given[argument_returned[result]]);
                continue;
            }
            std::vector<Tensor> made;
            for (const Tensor& form : tensors_of(forms[result])) {
                made.push_back(new_like(form));
                const Tensor& tensor = made.back();
                if (tensor.defined() && tensor.numel()) {
                    targets.push_back({result, made.size() - 1, reached(tensor)});
                }
            }
            if (forms[result].isTensor()) results.push_back(made[0]);
            else results.push_back(c10::List<Tensor>(made));
        }
        submit(stream, {task(std::move(targets))});
        return results;
    }

    Task task(std::vector<Target> targets) const {
        Stack inputs = arguments.on_host;
        std::vector<size_t> outs = places_of_out();
        auto operation = this->operation;
        return [operation, inputs, targets, outs]() mutable {
            Stack stack = inputs;
            for (size_t place : outs) {
                stack[place] = at::empty({0}, inputs[place].toTensor().options());
            }
            Stack fresh = stack;
            operation.callBoxed(&stack);
            for (size_t place : outs) {
                Tensor to = inputs[place].toTensor(), from = fresh[place].toTensor();
                TORCH_CHECK(
                    to.sizes() == from.sizes(), operation.schema().operator_name(), " has made ",
                    from.sizes(), " for ", to.sizes());
                to.copy_(from);
            }
            for (Target& target : targets) {
                target.tensor.copy_(tensors_of(stack[target.result])[target.item]);
            }
        };
    }

    Tensor to_device(const Tensor& value) const {
        Tensor tensor = new_like(value);
        if (tensor.defined() && tensor.numel()) submit_copy(stream, reached(tensor), value);
        return tensor;
    }

    Stack run_now() {
        wait_for_stream(stream);
        Stack made = arguments.on_host;
        {
            AsOnHost guard;
            operation.callBoxed(&made);
        }
        Stack results;
        for (size_t result = 0; result < returned.size(); result++) {
            const IValue& value = made[result];
            if (argument_returned[result] >= 0) {
                const IValue& given = arguments.given[argument_returned[result]];
                if (given.isTensor()) resize_as(given.toTensor(), value.toTensor());
                results.push_back(given);
            } else if (value.isTensor()) {
                results.push_back(to_device(value.toTensor()));
            } else if (value.isTensorList()) {
                c10::List<Tensor> list;
                for (const Tensor& tensor : value.toTensorVector()) {
                    list.push_back(to_device(tensor));
                }
                results.push_back(list);
            } else {
                results.push_back(value);
            }
        }
        return results;
    }

    // The host's operation has written into the tensor's own memory unless it needed another size.
    void resize_as(const Tensor& tensor, const Tensor& written) const {
        if (tensor.sizes() == written.sizes()) return;
        resize_tensor(tensor, written.sizes(), std::nullopt);
        submit_copy(stream, reached(tensor), written);
    }
};

inline void run_operation(
    const c10::OperatorHandle& operation, c10::DispatchKeySet, Stack* stack) {
    Stack results = Call(operation, *stack).run();
    torch::jit::drop(*stack, operation.schema().arguments().size());
    for (IValue& result : results) stack->push_back(std::move(result));
}

}  // namespace simulated
