package consumers

// SetStep makes the consumer call fn at its crash points.
func (c *Consumer) SetStep(fn func(step string)) { c.step = fn }
