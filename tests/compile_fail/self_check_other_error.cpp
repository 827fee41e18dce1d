// SPDX-License-Identifier: BSD-3-Clause
// error: use of deleted function
// The harness must complain: this fails, but not in the way that it says.
nonsense;
