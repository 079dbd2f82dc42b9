package kinds

// ApplyInSteps is Apply with a function that is called before each step, and whose error ends it there as a crash would.
var ApplyInSteps = apply

// Steps are those of Apply.
var Steps = []string{"truth tables", "projections", "truth object", "truth commit"}
