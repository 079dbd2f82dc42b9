package broker

// StepDown is stepDown for the tests that use servers.
var StepDown = stepDown
