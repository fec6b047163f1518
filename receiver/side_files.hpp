// Side files, which come with a layout and once only: a target that writes them writes those.
#pragma once

#include "deltasync/layout.hpp"

namespace deltasync::receiver {

/// layout_mismatch, with the names of the files that differ.
Status check_same_files(const Sidecar& held, const Sidecar& now);

}  // namespace deltasync::receiver
