// All of the public API.
#pragma once

#include "deltasync/control.hpp"
#include "deltasync/export.hpp"
#include "deltasync/layout.hpp"
#include "deltasync/part.hpp"
#include "deltasync/placement.hpp"
#include "deltasync/receiver.hpp"
#include "deltasync/result.hpp"
#include "deltasync/target.hpp"
#include "deltasync/timeline.hpp"
#include "deltasync/tls.hpp"
#include "deltasync/version.hpp"
#include "deltasync/writer.hpp"
