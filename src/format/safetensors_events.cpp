#include "format/safetensors_events.hpp"

namespace deltasync::safetensors {

bool HeaderEvents::fail(Errc code, std::string message) {
  if (!error_) error_.emplace(code, std::move(message));
  return false;
}

std::string HeaderEvents::where() const {
  switch (at_) {
    case At::start:
    case At::end: return "outside of the header's object";
    case At::metadata_value:
    case At::metadata_keys:
    case At::metadata_string: return "in __metadata__";
    default: return tensor_.empty() ? "in the header" : "in tensor '" + tensor_ + "'";
  }
}

bool HeaderEvents::unexpected(const char* what) {
  return fail(Errc::corrupt, std::string("unexpected ") + what + " " + where());
}

bool HeaderEvents::start_object(std::size_t) {
  switch (at_) {
    case At::start: at_ = At::names; return true;
    case At::tensor_value: at_ = At::tensor_keys; return true;
    case At::metadata_value: at_ = At::metadata_keys; return true;
    default: return unexpected("object");
  }
}

bool HeaderEvents::end_object() {
  switch (at_) {
    case At::names: at_ = At::end; return true;
    case At::tensor_keys: return finish_tensor();
    case At::metadata_keys: at_ = At::names; return true;
    default: return unexpected("end of an object");
  }
}

bool HeaderEvents::key(std::string& key) {
  switch (at_) {
    case At::names:
      if (key == kMetadataKey) {
        if (has_metadata_) return fail(Errc::corrupt, "__metadata__ is listed twice");
        has_metadata_ = true;
        at_ = At::metadata_value;
        return true;
      }
      if (key.empty()) return fail(Errc::corrupt, "a tensor without a name");
      if (entries_.size() >= kTensorsMax) return fail(Errc::corrupt, "more tensors than any model may have");
      tensor_ = key;
      at_ = At::tensor_value;
      return true;
    case At::tensor_keys: return tensor_key(key);
    case At::metadata_keys:
      if (!metadata_keys_.insert(key).second) {
        return fail(Errc::corrupt, "__metadata__ has the key '" + key + "' twice");
      }
      at_ = At::metadata_string;
      return true;
    default: return unexpected("key");
  }
}

bool HeaderEvents::tensor_key(const std::string& key) {
  bool* seen = nullptr;
  if (key == "dtype") {
    at_ = At::dtype;
    seen = &has_dtype_;
  } else if (key == "shape") {
    at_ = At::shape;
    seen = &has_shape_;
  } else if (key == "data_offsets") {
    at_ = At::offsets;
    seen = &has_offsets_;
  } else {
    return fail(Errc::corrupt, "tensor '" + tensor_ + "': unknown key '" + key + "'");
  }
  if (*seen) return fail(Errc::corrupt, "tensor '" + tensor_ + "': the key '" + key + "' twice");
  *seen = true;
  return true;
}

bool HeaderEvents::string(std::string& value) {
  if (at_ == At::metadata_string) {
    at_ = At::metadata_keys;
    return true;
  }
  if (at_ != At::dtype) return unexpected("string");
  const auto dtype = dtype_from_string(value);
  if (!dtype) return fail(Errc::unsupported, "tensor '" + tensor_ + "': dtype '" + value + "' is not known");
  entry_.dtype = *dtype;
  at_ = At::tensor_keys;
  return true;
}

bool HeaderEvents::start_array(std::size_t) {
  if (in_array_ || (at_ != At::shape && at_ != At::offsets)) return unexpected("array");
  in_array_ = true;
  return true;
}

bool HeaderEvents::end_array() {
  in_array_ = false;
  at_ = At::tensor_keys;
  return true;
}

bool HeaderEvents::number_unsigned(std::uint64_t value) {
  if (!in_array_) return unexpected("number");
  auto& list = at_ == At::shape ? entry_.shape : offsets_;
  if (list.size() >= (at_ == At::shape ? kTensorDimsMax : 2)) {
    return fail(Errc::corrupt,
                "tensor '" + tensor_ + "': " + (at_ == At::shape ? "shape" : "data_offsets") + " has too many numbers");
  }
  list.push_back(value);
  return true;
}

bool HeaderEvents::finish_tensor() {
  if (!has_dtype_ || !has_shape_ || offsets_.size() != 2) {
    return fail(Errc::corrupt, "tensor '" + tensor_ + "': needs dtype, shape and two data_offsets");
  }
  entry_.name = std::move(tensor_);
  entry_.begin = offsets_[0];
  entry_.end = offsets_[1];
  entries_.push_back(std::move(entry_));
  entry_ = Entry();
  tensor_.clear();
  offsets_.clear();
  has_dtype_ = has_shape_ = has_offsets_ = false;
  at_ = At::names;
  return true;
}

bool HeaderEvents::parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&) {
  return fail(Errc::corrupt, "not JSON at byte " + std::to_string(position) + " of the header");
}

}  // namespace deltasync::safetensors
