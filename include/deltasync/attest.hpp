// Whether live memory is what was committed.
#pragma once

#include <stop_token>
#include <string>
#include <vector>

#include "deltasync/deadline.hpp"
#include "deltasync/placement.hpp"
#include "deltasync/receiver.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

/// The placement's tiles whose elements in live memory are not those of the target's committed version, by name: "tile
/// 88 (model.layers.3.mlp.up_proj.weight)". Empty: all are as they were committed. All of live memory is read: on a
/// device by the device; copies of placed elements (tied weights) are not looked at. For targets of make_placed_target
/// and make_device_target; no call of a receiver that has it may be under way.
///
/// What differs was written by somebody else, or the memory is broken. A pull repairs it with FullOverLive::in_place or
/// a staged full update, once the receiver has found it too (ReceiverOptions::scrub_tiles) or is bound anew.
/// Errors: not_found if nothing is committed; timed_out, cancelled; io, a device's.
Result<std::vector<std::string>> attest(Target& target, const Placement& placement, Deadline deadline,
                                        std::stop_token stop = {});

}  // namespace deltasync
