package consumers

// SetStep has fn called at the crash points.
func (c *Consumer) SetStep(fn func(step string)) { c.step = fn }
