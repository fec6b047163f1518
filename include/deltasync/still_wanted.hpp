// Whether what was staged is still what is asked for.
#pragma once

#include <stop_token>

#include "deltasync/deadline.hpp"
#include "deltasync/receiver.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

/// Asks the agent whether `want` (a number or a label) means the staged version now. A trainer that has begun anew
/// gives the same numbers and labels to other weights: what was staged before that is not it any more, and neither is
/// what the agent has no memory of. One question, nothing is transferred, and what is staged stays. By whoever calls
/// the receiver, between its calls.
///
/// Errors: timed_out, cancelled, unauthenticated; layout_mismatch; invalid_argument if it is no longer staged, or for
/// another kind of want.
Result<bool> still_wanted(Receiver& receiver, const StagedUpdate& staged, const Want& want, Deadline deadline,
                          std::stop_token stop = {});

}  // namespace deltasync
